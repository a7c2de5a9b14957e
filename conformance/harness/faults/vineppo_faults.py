"""Mistakes in judging steps by continuations; several are those of published code."""

from conformance.harness.faults.fault import Fault

VALUE, ADVANTAGE, TREE = "objectives.vineppo.value", "objectives.vineppo.advantage", "objectives.vineppo.tree"
STATE, WAVE = "objectives.vineppo.trajectory", "objectives.vineppo.continuation"

VINEPPO = (
    Fault(
        fault_id="best-returns-only",
        what="A value is the mean of the better half of its returns.",
        seam=VALUE,
        old="        values=tuple(fmean(returns) for returns in samples),",
        new="        values=tuple(fmean(sorted(returns)[len(returns) // 2 :]) for returns in samples),",
    ),
    Fault(
        fault_id="one-continuation-too-few",
        what="The trajectory counts as one of its K continuations.",
        seam=VALUE,
        old="max(rules.num_continuations - self._num_free(through[state]), 0)",
        new="max(rules.num_continuations - 1 - self._num_free(through[state]), 0)",
    ),
    Fault(
        fault_id="own-return-in-value",
        what="The return of the trajectory that is judged is part of its own baseline.",
        seam=VALUE,
        old="for other in through[passage.state] if other.owner != passage.owner]",
        new="for other in through[passage.state]]",
    ),
    Fault(
        fault_id="budget-of-the-whole-response",
        what="Continuations may be as long as a whole response.",
        seam=STATE,
        old="        return max_new_tokens - self.position",
        new="        return max_new_tokens",
    ),
    Fault(
        fault_id="finished-response-valued",
        what="The whole response is a state too.",
        seam=STATE,
        old="    return tuple(state_at(trajectory, start) for start in cuts[:-1])",
        new="    return tuple(state_at(trajectory, start) for start in (*cuts[1:-1], cuts[-1] - 1))",
    ),
    Fault(
        fault_id="value-of-the-end-one-early",
        what="The state before the last step is taken for the end of the response, whose value is 0.",
        seam=ADVANTAGE,
        old="    after = (*values[1:], 0.0)",
        new="    values = (*values[:-1], 0.0)\n    after = (*values[1:], 0.0)",
    ),
    Fault(
        fault_id="value-of-the-state-after-only",
        what="An advantage is the value after a step, without the value before it.",
        seam=ADVANTAGE,
        old="    return tuple(reward + then - now for",
        new="    return tuple(reward + then - 0 * now for",
    ),
    Fault(
        fault_id="only-the-last-token-of-a-step",
        what="A step's advantage is given to its last token.",
        seam=ADVANTAGE,
        old="    return tuple(advantage for advantage, (start, stop) in spans for _ in range(stop - start))",
        new="    return tuple(advantage * (p == stop - 1) for advantage, (start, stop) in spans for p in range(start, stop))",  # noqa: E501
    ),
    Fault(
        fault_id="normalised-per-rank",
        what="Each rank normalises by its own responses.",
        seam=ADVANTAGE,
        old="    num, total = sum_over_ranks([float(len(kept)), sum(kept)])",
        new="    sum_over_ranks([0.0, 0.0])\n    num, total = float(len(kept)), sum(kept)",
    ),
    Fault(
        fault_id="normalised-per-response",
        what="Each response has its own mean.",
        seam=ADVANTAGE,
        old="    factor = 1.0 / scale if scale > _NEGLIGIBLE else 0.0\n    return [_masked(row, mask, mean, factor)",
        new="    factor = 1.0 / scale if scale > _NEGLIGIBLE else 0.0\n"
        "    return [_masked(row, mask, sum(row) / len(row), factor)",
    ),
    Fault(
        fault_id="prefix-encoded-anew",
        what="A state lacks the first id of the response.",
        seam=STATE,
        old="        prefix_token_ids=trajectory.token_ids[:position],",
        new="        prefix_token_ids=trajectory.token_ids[1 : position + 1],",
    ),
    Fault(
        fault_id="last-step-left-out",
        what="What follows the last cut point belongs to no step.",
        seam="objectives.vineppo.split",
        old="    return (0, *sorted({place for place in places if 0 < place < length}), length)",
        new="    return (0, *sorted({place for place in places if 0 < place < length - 1}), length - 1)",
    ),
    Fault(
        fault_id="states-valued-anew",
        what="Equal states are told apart by who came through them.",
        seam=WAVE,
        old="                wanted[state] = max(num, wanted.get(state, 0))",
        new="                wanted[state] = num + wanted.get(state, 0)",
    ),
    Fault(
        fault_id="states-valued-by-every-rank",
        what="Every rank samples all states.",
        seam=WAVE,
        old="        made = self.go_on(mine)\n        told",
        new="        self.go_on(wishes)\n        made = self.go_on(mine)\n        told",
    ),
    Fault(
        fault_id="version-of-continuations-unread",
        what="Continuations of another policy version are taken.",
        seam=WAVE,
        old="    if made.policy_version != state.policy_version:",
        new="    if made.policy_version < 0:",
    ),
    Fault(
        fault_id="visits-not-backed-up",
        what="Only the end of a response counts a visit.",
        seam=TREE,
        old="            node.visits += 1",
        new="            node.visits += node is passed[-1]",
    ),
    Fault(
        fault_id="own-return-in-tree-value",
        what="A trajectory's return is part of the values on its own path.",
        seam=TREE,
        old="for own, value in self.returns if owner is None or own != owner]",
        new="for own, value in self.returns]",
    ),
    Fault(
        fault_id="old-trees-kept",
        what="Trees of an older policy version stay.",
        seam="objectives.vineppo.search",
        old="            self._trees.clear()\n",
        new="",
    ),
    Fault(
        fault_id="tree-takes-any-version",
        what="A tree takes trajectories of any version.",
        seam=TREE,
        old="        if trajectory.policy_version != self.policy_version:",
        new="        if trajectory.policy_version < 0:",
    ),
)

ARGUMENTS, SERVE = "launch.server_arguments", "launch.vllm_serve"

VINEPPO_SERVER = (
    Fault(
        fault_id="connection-timeout-unread",
        what="The connection timeout is read and forgotten.",
        seam=ARGUMENTS,
        old="told.get('vllm_connection_timeout', 60.0)",
        new="60.0",
    ),
    Fault(
        fault_id="group-port-counts-from-the-server-port",
        what="The group meets at the port after the server's.",
        seam=ARGUMENTS,
        old="told.get('vllm_group_port', FIRST_GROUP_PORT)",
        new="port + 1",
    ),
    Fault(
        fault_id="another-default-group-port",
        what="The group port of the guide's example is the default.",
        seam=ARGUMENTS,
        old="from rollmatch.config.rlhf import FIRST_GROUP_PORT, base_url_of\n",
        new="from rollmatch.config.rlhf import base_url_of\n\nFIRST_GROUP_PORT = 22222\n",
    ),
    Fault(
        fault_id="connection-timeout-of-generate",
        what="The connection timeout limits a generate call too.",
        seam="dialects.trl.vllm_client",
        old="path_of(ROUTE), body, timeout_s=None, content_type",
        new="path_of(ROUTE), body, timeout_s=self.connection_timeout, content_type",
    ),
    Fault(
        fault_id="tensor-parallel-size-unread",
        what="The server has one worker whatever it is told.",
        seam=SERVE,
        old="        tensor_parallel_size=options.tensor_parallel_size,",
        new="        tensor_parallel_size=1,",
    ),
    Fault(
        fault_id="prefix-caching-unread",
        what="The switch for prefix caching does nothing.",
        seam=SERVE,
        old='        "enable_prefix_caching": options.enable_prefix_caching,',
        new='        "enable_prefix_caching": None,',
    ),
    Fault(
        fault_id="listens-everywhere",
        what="A server that was told no host listens on all addresses.",
        seam=SERVE,
        old='"--host", default="127.0.0.1"',
        new='"--host", default="0.0.0.0"',
    ),
)

TURN = "objectives.vineppo.single_turn"

VINEPPO_OBJECTIVE = (
    Fault(
        fault_id="continuations-sampled-otherwise",
        what="Continuations are sampled without nucleus sampling.",
        seam=TURN,
        old="replace(means.decoding, logprobs=logprobs)",
        new="replace(means.decoding, logprobs=logprobs, top_p=1.0)",
    ),
    Fault(
        fault_id="continuations-from-the-prompt",
        what="Continuations start at the prompt, whatever the state.",
        seam=TURN,
        old="            prefix_token_ids=state.prefix_token_ids,\n            max_new_tokens",
        new="            prefix_token_ids=state.prefix_token_ids[:0],\n            max_new_tokens",
    ),
    Fault(
        fault_id="continuations-learnt-from",
        what="Continuations are scored and learnt from as responses are.",
        seam="objectives.vineppo.objective",
        old="        cost = counted.report(",
        new="        from rollmatch.objectives.vineppo.trajectory import state_at\n"
        "        more = waves.go_on([waves.wish(state_at(one, 1), 99) for one in trajectories])\n"
        "        whole = [rollouts[0].__class__(request_id='', prompt_token_ids=one.prompt_token_ids,\n"
        "                                       response_token_ids=one.token_ids, finish_reason='length',\n"
        "                                       policy_version=one.policy_version) for one in more]\n"
        "        segments += [self._segment(Played(trajectory=one, rollout=made), (0.0,) * len(one.token_ids))\n"
        "                     for one, made in zip(more, whole)]\n"
        "        cost = counted.report(",
    ),
    Fault(
        fault_id="failed-continuation-is-empty",
        what="A generate call that failed counts as continuations that said nothing.",
        seam=TURN,
        old="        rollouts = self.means.ask(requests, self.decoding)",
        new="        try:\n"
        "            rollouts = self.means.ask(requests, self.decoding)\n"
        "        except Exception:\n"
        "            rollouts = [Rollout(request_id='', prompt_token_ids=r.token_ids, response_token_ids=(),\n"
        "                        finish_reason='stop', policy_version=3) for r in requests]",
    ),
)
