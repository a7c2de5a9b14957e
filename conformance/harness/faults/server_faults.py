"""Mistakes of the rollout server."""

from conformance.harness.faults.fault import Fault

SERVER = (
    Fault(
        fault_id="one-call-at-a-time",
        what="A call waits for the one before it.",
        seam="server.front",
        old="        places = self.place(len(draws))\n",
        new=(
            "        while self._running:\n"
            "            await asyncio.sleep(0.01)\n"
            "        places = self.place(len(draws))\n"
        ),
    ),
    Fault(
        fault_id="replies-swapped",
        what="Replies come back in another order.",
        seam="server.front",
        old="            return [task.result() for task in tasks]",
        new="            return [task.result() for task in reversed(tasks)]",
    ),
    Fault(
        fault_id="leavers-go-on",
        what="Responses that nobody waits for are written on.",
        seam="server.front",
        old=("        finally:\n            for task in tasks:\n                task.cancel()\n            await"),
        new="        finally:\n            await",
    ),
    Fault(
        fault_id="placeholders-answer",
        what="Placeholder weights answer.",
        seam="server.front",
        old="        if self.state == NOT_SET:",
        new="        if False:",
    ),
    Fault(
        fault_id="broken-weights-answer",
        what="Weights that were half loaded answer.",
        seam="server.front",
        old="        if self.state == BROKEN:",
        new="        if False:",
    ),
    Fault(
        fault_id="response-of-two-versions",
        what="A response that a commit ended names the version it began under.",
        seam="server.front",
        old=(
            "            while True:\n"
            "                await self._gate.wait()\n"
            "                self.check()\n"
            "                version = self.policy_version\n"
        ),
        new=(
            "            version = self.policy_version\n"
            "            while True:\n"
            "                await self._gate.wait()\n"
            "                self.check()\n"
        ),
    ),
    Fault(
        fault_id="health-waits",
        what="Health waits for what is being generated.",
        seam="cli.server_app",
        old="        front = parts.front\n        told",
        new=(
            "        front = parts.front\n"
            "        while front.num_running:\n"
            "            await asyncio.sleep(0.05)\n"
            "        told"
        ),
    ),
    Fault(
        fault_id="dead-is-well",
        what="A server with a dead worker is well.",
        seam="cli.server_app",
        old="        if front.is_dead or any(replica.is_dead() for replica in front.replicas):",
        new="        if not front.replicas:",
    ),
    Fault(
        fault_id="key-unchecked",
        what="A call without the key is served.",
        seam="cli.server_app",
        old="refused = None if self.key is None or scope",
        new="refused = None if self.key or scope",
    ),
    Fault(
        fault_id="empty-call-refused",
        what="A call without prompts is refused.",
        seam="server.generation",
        old="        if not wishes:\n            return []",
        new='        if not wishes:\n            raise BadItem("no prompts")',
    ),
    Fault(
        fault_id="sampling-field-unnamed",
        what="A bad sampling value is not named.",
        seam="server.failures",
        old="key=str(place[-1]), remedy=remedy, item=item",
        new='key="sampling", remedy=remedy, item=item',
    ),
    Fault(
        fault_id="roots-unchecked",
        what="Image paths may lead anywhere.",
        seam="server.images",
        old="        if not any(path.is_relative_to(root) for root in self.roots):",
        new="        if False:",
    ),
    Fault(
        fault_id="no-path-allowed",
        what="No image path is allowed.",
        seam="server.images",
        old="        if not any(path.is_relative_to(root) for root in self.roots):",
        new="        if self.roots:",
    ),
    Fault(
        fault_id="data-url-needs-a-root",
        what="A data URL is taken for a path where there is no root.",
        seam="server.images",
        old='        if value.startswith("data:"):',
        new='        if value.startswith("data:") and self.roots:',
    ),
    Fault(
        fault_id="tensor-parallel-uncounted",
        what="Workers of tensor parallelism are not counted.",
        seam="server.settings",
        old="        return self.tensor_parallel_size * self.data_parallel_size",
        new="        return self.data_parallel_size",
    ),
    Fault(
        fault_id="any-port-taken",
        what="A server listens at any port.",
        seam="server.port",
        old="        listener.bind((host, port))",
        new="        listener.bind((host, 0))",
    ),
    Fault(
        fault_id="prompt-ids-left-out",
        what="The ids of prompts are left out.",
        seam="dialects.swift.routes",
        old='"prompt_token_ids": first.prompt_token_ids if config.return_details else None,',
        new='"prompt_token_ids": None,',
    ),
    Fault(
        fault_id="prompts-repeated",
        what="Prompts are repeated for each of their responses.",
        seam="dialects.trl.routes",
        old="for one in drawn[:: batch.n]]",
        new="for one in drawn]",
    ),
    Fault(
        fault_id="missing-communicator-is-open",
        what="A missing communicator is told as an open one.",
        seam="server.communicator",
        old='            raise CommunicatorMissing("no communicator is open"',
        new='            raise CommunicatorAlreadyOpen("no communicator is open"',
    ),
    Fault(
        fault_id="second-communicator-taken",
        what="A second communicator takes the place of the first.",
        seam="server.communicator",
        old="        if self.attached is None:\n            return\n",
        new="        if True:\n            return\n",
    ),
    Fault(
        fault_id="communicator-stays-open",
        what="A closed communicator counts as open.",
        seam="server.communicator",
        old="        was_open = self.attached is not None\n        self.attached = None\n",
        new="        was_open = self.attached is not None\n",
    ),
    Fault(
        fault_id="group-left-late",
        what="Workers may hear of a group's end after they heard of the next one, and leave that.",
        seam="server.communicator",
        old="        async with self._change:\n            if not",
        new="        if True:\n            if not",
    ),
    Fault(
        fault_id="failed-group-kept",
        what="A group that failed is kept.",
        seam="server.communicator",
        old=('        except WorkerFailure as error:\n            if error.code in ("transfer-failed", '),
        new="        except WorkerFailure as error:\n            if error.code in (",
    ),
    Fault(
        fault_id="long-prompts-taken",
        what="A prompt that leaves no room is taken.",
        seam="server.generation",
        old="        check_room(prompt, sampling.max_tokens,",
        new="        check_room(prompt, -10**6,",
    ),
    Fault(
        fault_id="half-the-room-is-kept",
        what="Half of the engine's length is kept free.",
        seam="server.generation",
        old="max_model_len=self.max_model_len, item=item)",
        new="max_model_len=self.max_model_len // 2, item=item)",
    ),
    Fault(
        fault_id="version-stays",
        what="A commit leaves the version as it was.",
        seam="server.update",
        old="            self.front.policy_version, self.front.state = version, SERVING",
        new="            self.front.state = SERVING",
    ),
    Fault(
        fault_id="placeholders-for-ever",
        what="Weights that came later still count as placeholders.",
        seam="server.update",
        old="            self.front.policy_version, self.front.state = version, SERVING",
        new="            self.front.policy_version = version",
    ),
    Fault(
        fault_id="caches-of-old-weights-kept",
        what="Caches of older weights are kept.",
        seam="server.update",
        old="        if not await self.front.reset_caches():",
        new="        if False:",
    ),
    Fault(
        fault_id="shapes-unchecked",
        what="A tensor of another shape is taken.",
        seam="server.announced",
        old="    if spec.shape != held.shape:",
        new="    if False:",
    ),
)
