"""Mistakes of a run with servers: weights into stock ones, what is written down, who starts and ends what."""

from conformance.harness.faults.fault import Fault

SERVER_MODE = (
    Fault(
        fault_id="stock-server-not-paused",
        what="A stock server goes on generating while its weights change.",
        seam="dialects.vllm.sender",
        old='            self._everywhere(lambda server: server.control(PAUSE, query="mode=wait&clear_cache=true"))\n',
        new="",
    ),
    Fault(
        fault_id="stock-learner-is-last",
        what="The workers of stock servers count from 0, as if the learner came last.",
        seam="dialects.vllm.sender",
        old="        offsets = [1 + sum(sizes[:place]) for place in range(len(sizes))]\n",
        new="        offsets = [sum(sizes[:place]) for place in range(len(sizes))]\n",
    ),
    Fault(
        fault_id="stock-server-left-paused",
        what="A stock server is resumed only after a good update.",
        seam="dialects.vllm.sender",
        old="        finally:\n            self._everywhere(lambda server: server.control(RESUME))\n",
        new="        self._everywhere(lambda server: server.control(RESUME))\n",
    ),
    Fault(
        fault_id="stock-refusal-passed-over",
        what="A stock server's refusal of an update is not looked at.",
        seam="dialects.vllm.sender",
        old="            call.result()\n            waiting.remove(call)\n",
        new="            waiting.remove(call)\n",
    ),
    Fault(
        fault_id="in-place-not-refused",
        what="Calls wait while weights are written in place, in place of being refused.",
        seam="server.in_place",
        old="            front.state = WRITING\n",
        new="            pass\n",
    ),
    Fault(
        fault_id="stop-token-left-to-the-server",
        what="The stop token is left to the server.",
        seam="dialects.swift.client",
        old='            "stop": list(sampling.stop_texts),\n',
        new="",
    ),
    Fault(
        fault_id="splits-not-counted",
        what="A split call is told as one.",
        seam="dialects.session",
        old="        log.num_splits += 1\n",
        new="",
    ),
    Fault(
        fault_id="retries-not-counted",
        what="A call that is sent again is told as one.",
        seam="dialects.session",
        old="            log.num_retries += 1\n",
        new="",
    ),
    Fault(
        fault_id="calls-not-written-down",
        what="The journal keeps nothing of the sampling values of a call.",
        seam="rollout.vllm_server",
        old=", decoding=decoding.as_dict(), **log.as_dict())",
        new=", decoding={}, **log.as_dict())",
    ),
    Fault(
        fault_id="nobody-is-waited-for",
        what="Servers that do not join are waited for longer than was configured.",
        seam="dialects.native.group",
        old="time.monotonic() + self.meeting.join_timeout_s\n",
        new="time.monotonic() + self.meeting.join_timeout_s + 4\n",
    ),
    Fault(
        fault_id="one-replica-works",
        what="All responses are written by the first replica.",
        seam="server.front",
        old="        share, extra = divmod(num_draws, len(order))\n",
        new="        order = [0]\n        share, extra = divmod(num_draws, len(order))\n",
    ),
    Fault(
        fault_id="engine-in-the-learner",
        what="The learner loads the engine, too.",
        seam="launch.assemble",
        old="    if uses_servers(config):\n        return connect_servers(",
        new=(
            "    if uses_servers(config):\n"
            "        import rollmatch.rollout.vllm_colocate\n"
            "        return connect_servers("
        ),
    ),
    Fault(
        fault_id="weights-sent-every-other-step",
        what="Every other step generates with the weights of the one before.",
        seam="rollout.fence",
        old="        is_due = step != self.synced_step or not",
        new="        is_due = step - step % 2 != self.synced_step or not",
    ),
    Fault(
        fault_id="missing-engine-passed-over",
        what="Whether the engine is installed is not looked at.",
        seam="launch.learner",
        old='    if backend == "vllm" and importlib.util.find_spec("vllm") is None:',
        new="    if False:",
    ),
    Fault(
        fault_id="ranks-untimed",
        what="A step tells nothing of how long each rank waited.",
        seam="launch.watch",
        old='n.startswith("time/rollout_s/rank")]',
        new='n.startswith("time/none")]',
    ),
    Fault(
        fault_id="group-port-tested",
        what="The server's launcher tries the group port, too.",
        seam="launch.rollout_server",
        old="        become(command)\n",
        new='        bind_http("127.0.0.1", address.group_port).close()\n        become(command)\n',
    ),
    Fault(
        fault_id="shared-gpus-untold",
        what="A GPU may be used by server and learner.",
        seam="launch.served",
        old="    if shared and is_loopback(base_url):\n",
        new="    if False:\n",
    ),
    Fault(
        fault_id="any-model-served",
        what="A server may hold any model.",
        seam="launch.served",
        old="    if digest != model.digest:\n",
        new="    if False:\n",
    ),
    Fault(
        fault_id="launcher-beside-its-server",
        what="The launcher stays beside the server that it starts, and keeps signals to itself.",
        seam="launch.command",
        old="    os.execve(program, command.words, environment)",
        new="    import subprocess, sys\n    sys.exit(subprocess.Popen(command.words, env=environment).wait())",
    ),
    Fault(
        fault_id="gone-ranks-agree",
        what="A rank that is gone is taken to agree.",
        seam="ranks",
        old="        dist.all_gather_object(items, item)\n",
        new=(
            "        try:\n"
            "            dist.all_gather_object(items, item)\n"
            "        except RuntimeError:\n"
            "            items = [item] * self.learner_world_size\n"
        ),
    ),
    Fault(
        fault_id="servers-answers-cut",
        what="The last id of a response at its limit is lost on the way from the server.",
        seam="rollout.vllm_server",
        old="        response = reply.response_token_ids[:max_new_tokens]\n",
        new="        response = reply.response_token_ids[: max_new_tokens - 1]\n",
    ),
    Fault(
        fault_id="every-rank-joins",
        what="The group has room for a second learner rank, which never comes.",
        seam="dialects.native.group",
        old="        meeting, world_size = self.meeting, self.rank + 1\n",
        new="        meeting, world_size = self.meeting, self.rank + 2\n",
    ),
    Fault(
        fault_id="servers-have-an-order-of-their-own",
        what="Server mode walks through the samples in another order.",
        seam="launch.assemble",
        old='    named |= {\n        "report_to"',
        new='    named["seed"] += uses_servers(config)\n    named |= {\n        "report_to"',
    ),
)
