"""Mistakes between learner and servers: chunks, syncs, fences."""

from conformance.harness.faults.fault import Fault

SYNC = (
    Fault(
        fault_id="chunks-too-long",
        what="Chunks are one request longer than they need to be.",
        seam="rollout.chunk",
        old="    size = -(-num_requests // num_servers)",
        new="    size = -(-num_requests // num_servers) + 1",
    ),
    Fault(
        fault_id="empty-chunk-sent",
        what="A server is called for no requests.",
        seam="rollout.chunk",
        old="range(0, num_requests, size or 1)",
        new="range(0, num_requests or 1, size or 1)",
    ),
    Fault(
        fault_id="chunks-take-turns",
        what="Chunks go to another server every time.",
        seam="rollout.vllm_server",
        old="        chunks = cut_chunks(len(requests), len(self.servers))\n",
        new=(
            '        self._turn = getattr(self, "_turn", 0) + 1\n'
            "        chunks = [\n"
            "            chunk._replace(server_index=(chunk.server_index + self._turn) % len(self"
            ".servers))\n"
            "            for chunk in cut_chunks(len(requests), len(self.servers))\n"
            "        ]\n"
        ),
    ),
    Fault(
        fault_id="replies-as-they-come",
        what="The last server's replies come first.",
        seam="rollout.vllm_server",
        old="[reply for call in calls for reply in call.result()]",
        new="[reply for call in reversed(calls) for reply in call.result()]",
    ),
    Fault(
        fault_id="gathers-left-early",
        what="Ranks without servers leave the gathers of sharded weights.",
        seam="rollout.vllm_server",
        old='            if getattr(weights, "is_sharded", True):',
        new="            if False:",
    ),
    Fault(
        fault_id="failed-push-swallowed",
        what="A push that failed is taken for one that went well.",
        seam="rollout.vllm_server",
        old=(
            "            if self.sender:\n                self.sender.send(passing, version=version)\n        finally:"
        ),
        new=(
            "            if self.sender:\n"
            "                self.sender.send(passing, version=version)\n"
            "        except RollmatchError:\n"
            "            pass\n"
            "        finally:"
        ),
    ),
    Fault(
        fault_id="unknown-tensor-sent",
        what="A tensor that the server lacks is sent.",
        seam="weights.plan",
        old="    if held is None:\n",
        new="    if held is None:\n        return spec\n",
    ),
    Fault(
        fault_id="digests-left-out",
        what="Zeros follow the tensors instead of their digests.",
        seam="weights.shipment",
        old="            digests += [digest_of_bytes(part) for part in parts]\n",
        new="            digests += [bytes(16) for _ in parts]\n",
    ),
    Fault(
        fault_id="smaller-buckets-for-more-servers",
        what="More servers are sent more and smaller broadcasts.",
        seam="dialects.native.sender",
        old="            size = self.bucket_bytes or self._carrier.bucket_bytes\n",
        new="            size = (self.bucket_bytes or self._carrier.bucket_bytes) // len(self.servers)\n",
    ),
    Fault(
        fault_id="versions-skipped",
        what="Every sync skips a version.",
        seam="dialects.native.sender",
        old='            "version": version,\n',
        new='            "version": version + 1,\n',
    ),
    Fault(
        fault_id="commits-believed",
        what="A server is believed to serve what it was sent.",
        seam="dialects.native.sender",
        old='    if reply.get("committed") is not True or reply.get("policy_version") != version:',
        new="    if False:",
    ),
    Fault(
        fault_id="weights-by-disk",
        what="Weights are left on disk on their way.",
        seam="weights.shipment",
        old="            yield next(memory).fill(parts)\n",
        new='            torch.save(parts, "weights.pt")\n            yield next(memory).fill(parts)\n',
    ),
    Fault(
        fault_id="adapter-with-its-base",
        what="The base weights travel beside the adapter.",
        seam="weights.adapter",
        old="        tensors += [(place, tensor) for _, place, tensor in parts]\n",
        new=(
            "        tensors += [(place, tensor) for _, place, tensor in parts]\n"
            '        tensors.append((f"{checkpoint_name(name)}.base.weight", layer.base_layer.wei'
            "ght.detach()))\n"
        ),
    ),
    Fault(
        fault_id="busy-group-port-unnamed",
        what="A group port in use is not named.",
        seam="dialects.native.group",
        old='has no free port {meeting.port} at {meeting.host}"',
        new='has no free port"',
    ),
    Fault(
        fault_id="failed-rank-unnamed",
        what="A failed push does not tell whose it was.",
        seam="rollout.fence",
        old='f"rank {self.ranks.rank}: {type(error).__name__}: {error}"',
        new='f"{type(error).__name__}: {error}"',
    ),
    Fault(
        fault_id="restart-unseen",
        what="A server that was started again is believed to hold the weights.",
        seam="rollout.fence",
        old=" or not _is_current(self.backend)",
        new="",
    ),
    Fault(
        fault_id="fallback-forgotten",
        what="A failed adapter sync is tried again in the next step.",
        seam="rollout.sync_mode",
        old='        self.mode = "full"\n        LOG',
        new="        LOG",
    ),
    Fault(
        fault_id="fallback-unasked",
        what="An adapter sync falls back though it may not.",
        seam="rollout.sync_mode",
        old="        if not self.fallback_to_full:",
        new="        if False:",
    ),
    Fault(
        fault_id="buckets-count-elements",
        what="Places in a bucket count elements.",
        seam="dialects.queued_sender",
        old="        stop = start + spec.num_bytes\n",
        new='        stop = start + __import__("math").prod(spec.shape)\n',
    ),
    Fault(
        fault_id="trainer-is-the-first-rank",
        what="The trainer joins as the first rank.",
        seam="dialects.queued_sender",
        old="        rank=world_size - 1,",
        new="            rank=0,",
    ),
)
