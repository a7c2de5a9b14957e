"""Mistakes of the client of rollout servers."""

from conformance.harness.faults.fault import Fault

CLIENT = (
    Fault(
        fault_id="no-second-try",
        what="A call that broke is not tried again.",
        seam="dialects.session",
        old="        except TransportFailed:\n            log.num_retries += 1\n",
        new="        except TransportFailed:\n            raise\n",
    ),
    Fault(
        fault_id="halves-counted-anew",
        what="The second half of a call counts its requests from the start of the call.",
        seam="dialects.session",
        old="self.infer(prompts[middle:], sampling, start=start + middle, log=log)",
        new="self.infer(prompts[middle:], sampling, start=start, log=log)",
    ),
    Fault(
        fault_id="refusal-asked-again",
        what="A call that was refused is tried again.",
        seam="dialects.session",
        old="        except TransportFailed:\n            log.num_retries += 1\n",
        new="        except RolloutError:\n            log.num_retries += 1\n",
    ),
    Fault(
        fault_id="refusal-of-nobody",
        what="A refused call does not name its server.",
        seam="dialects.session",
        old='    told = type(error)(f"{error.problem} ({span})", key=base_url, remedy=error.remedy)',
        new='    told = type(error)(f"{error.problem} ({span})", key="", remedy=error.remedy)',
    ),
    Fault(
        fault_id="control-call-sent-again",
        what="A control call that broke is sent again.",
        seam="dialects.session",
        old=("        return self.http.post(path, body, timeout_s=timeout_s, content_type=content_type).body"),
        new=(
            "        try:\n"
            "            return self.http.post(path, body, timeout_s=timeout_s, co"
            "ntent_type=content_type).body\n"
            "        except TransportFailed:\n"
            "            return self.http.post(path, body, timeout_s=timeout_s, co"
            "ntent_type=content_type).body"
        ),
    ),
    Fault(
        fault_id="limit-ignored",
        what="Generate calls have no time limit, whatever was asked for.",
        seam="dialects.session",
        old="timeout_s=limit or None, content_type",
        new="timeout_s=None, content_type",
    ),
    Fault(
        fault_id="limit-much-shorter",
        what="Generate calls have a tenth of their time.",
        seam="dialects.session",
        old="timeout_s=limit or None, content_type",
        new="timeout_s=limit and limit / 10, content_type",
    ),
    Fault(
        fault_id="nobody-watches",
        what="Nobody looks at the health of a server that was asked.",
        seam="dialects.session",
        old=('        return call() if limit else watched(call, self.http, self.path_of("/health"), self.watch)'),
        new="        return call()",
    ),
    Fault(
        fault_id="entries-counted-from-one",
        what="Entries of an answer are counted from one.",
        seam="dialects.reply",
        old='            f"entry {place} of the answer of {base_url} has no {name}"',
        new='            f"entry {place + 1} of the answer of {base_url} has no {name}"',
    ),
    Fault(
        fault_id="answers-uncounted",
        what="Fewer answers than requests are taken.",
        seam="dialects.reply",
        old="    if len(body) != num_requests:",
        new="    if len(body) > num_requests:",
    ),
    Fault(
        fault_id="refusal-without-status",
        what="A refusal without a code does not tell its status.",
        seam="dialects.http",
        old="answered {response.status_code}: {text}",
        new="answered: {text}",
    ),
    Fault(
        fault_id="refused-key-lost",
        what="The key of a server's refusal is lost.",
        seam="dialects.http",
        old="key=key or base_url,",
        new="key=base_url,",
    ),
    Fault(
        fault_id="proxies-believed",
        what="Calls to this machine go through the environment's proxy.",
        seam="dialects.http",
        old="session.trust_env = not is_loopback(self.host)",
        new="session.trust_env = True",
    ),
    Fault(
        fault_id="slash-of-the-url-kept",
        what="A slash at the end of a base URL is doubled.",
        seam="dialects.http",
        old='self.base_url = base_url.rstrip("/")',
        new="self.base_url = base_url",
    ),
    Fault(
        fault_id="dialect-always-native",
        what="Every server is taken for one of ours.",
        seam="dialects.dialect",
        old="            return name\n",
        new='            return "native"\n',
    ),
    Fault(
        fault_id="unknown-routes-are-vllm",
        what="A server with other routes is taken for vLLM's.",
        seam="dialects.dialect",
        old="        if signs <= routes.keys():",
        new='        if signs <= routes.keys() or name == "vllm":',
    ),
    Fault(
        fault_id="call-without-seed",
        what="A call of the swift dialect carries no seed.",
        seam="dialects.swift.client",
        old='"seed": prompts[0].seed,',
        new='"seed": 0,',
    ),
    Fault(
        fault_id="samples-sent",
        what="Requests carry more of their samples than they need.",
        seam="dialects.native.client",
        old='                "images": list(prompt.images),',
        new=('                "images": list(prompt.images),\n                "messages": list(prompt.messages),'),
    ),
    Fault(
        fault_id="start-without-servers",
        what="Servers are not waited for at the start.",
        seam="launch.connect",
        old="    connect_all(servers)\n",
        new="",
    ),
    Fault(
        fault_id="reachability-limits-generation",
        what="Without a limit, generate calls take that of health.",
        seam="launch.connect",
        old="infer_timeout_s=limit if limit is not None and limit > 0 else None",
        new="infer_timeout_s=limit if limit is not None else told.timeout_s",
    ),
    Fault(
        fault_id="zero-is-a-limit",
        what="A limit of zero is a short one.",
        seam="launch.connect",
        old="infer_timeout_s=limit if limit is not None and limit > 0 else None",
        new="infer_timeout_s=(limit or 0.1) if limit is not None else None",
    ),
    Fault(
        fault_id="every-rank-sends",
        what="Every learner rank sends weights.",
        seam="launch.connect",
        old="make_sender(servers, ports, meeting) if ranks.is_primary else None",
        new="make_sender(servers, ports, meeting)",
    ),
)
