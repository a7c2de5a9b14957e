"""Mistakes of the commands that start servers and learners."""

from conformance.harness.faults.fault import Fault

LAUNCH = (
    Fault(
        fault_id="port-of-nobody",
        what="The server listens at a port of its own.",
        seam="launch.rollout_server",
        old="    return parts.port or (443",
        new="    return 8000 or (443",
    ),
    Fault(
        fault_id="one-replica-on-a-cpu",
        what="Without GPUs there is one replica.",
        seam="launch.rollout_server",
        old="    replicas = section.vllm_data_parallel_size or len(devices) // size or 1",
        new=(
            "    replicas = section.vllm_data_parallel_size or (len(devices) // size if on_gpu el"
            "se 0) or 1\n"
            "    devices = devices if on_gpu else devices[:1]"
        ),
    ),
    Fault(
        fault_id="gpus-uncounted",
        what="There may be fewer GPUs than workers.",
        seam="launch.rollout_server",
        old="    if size * replicas != len(devices):",
        new="    if size * replicas < len(devices):",
    ),
    Fault(
        fault_id="swift-told-otherwise",
        what="swift is told another length.",
        seam="launch.swift_words",
        old='        "vllm_max_model_len": max_model_len(config),',
        new='        "vllm_max_model_len": config.global_max_length,',
    ),
    Fault(
        fault_id="hub-ids-believed",
        what="A model that is no directory is believed.",
        seam="config.files",
        old="    if not directory.is_dir():",
        new="    if directory.is_file():",
    ),
    Fault(
        fault_id="gpus-not-shown",
        what="The server is not told its GPUs.",
        seam="launch.rollout_server",
        old='{"CUDA_VISIBLE_DEVICES": ",".join(devices)}',
        new='{"CUDA_VISIBLE_DEVICES": devices[0]}',
    ),
    Fault(
        fault_id="one-look-at-the-server",
        what="A server that is not there yet is given up.",
        seam="launch.await_servers",
        old="            if left_s <= LOOK_S:",
        new="            if True:",
    ),
    Fault(
        fault_id="waits-much-longer",
        what="The launcher waits much longer than it was told.",
        seam="launch.await_servers",
        old="    deadline = time.monotonic() + limit_s\n",
        new="    deadline = time.monotonic() + 3 * limit_s\n",
    ),
    Fault(
        fault_id="sizes-unchecked",
        what="A server may have another size.",
        seam="launch.await_servers",
        old='    if answer["world_size"] != wanted:',
        new="    if False:",
    ),
    Fault(
        fault_id="one-rank-for-all-gpus",
        what="Several GPUs have one learner process.",
        seam="launch.learner_launcher",
        old='"--nproc-per-node", str(num_processes), *learner]',
        new='"--nproc-per-node", "1", *learner]',
    ),
    Fault(
        fault_id="group-left-open",
        what="A run that ends in an error leaves its group open.",
        seam="launch.run",
        old="        trainer.ring.close()",
        new="        pass",
    ),
    Fault(
        fault_id="servers-started-too",
        what="The learner's command starts servers, too.",
        seam="launch.cli",
        old='    serve = commands.add_parser("serve", help="start a rollout server")',
        new=(
            '    serve = commands.add_parser("serve", help="start a rollout server")\n'
            '    commands.add_parser("all", help="start servers and learner")'
        ),
    ),
    Fault(
        fault_id="servers-untold",
        what="The run does not say where it generates.",
        seam="launch.run",
        old='        "servers": [address.base_url for address in pair_servers(',
        new='        "servers": [address.base_url[:0] for address in pair_servers(',
    ),
    Fault(
        fault_id="age-of-the-youngest",
        what="A step tells the newest version it learns from, not the oldest.",
        seam="ring",
        old="            oldest_policy_version=min(",
        new="            oldest_policy_version=max(",
    ),
)
