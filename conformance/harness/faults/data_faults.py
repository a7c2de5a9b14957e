"""Mistakes in reading a data set, and in the order and the seeds of requests."""

from conformance.harness.faults.fault import Fault

DATA = (
    Fault(
        fault_id="coordinates-turned-round",
        what="Coordinates are read backwards.",
        seam="data.geometry",
        old="    return tuple(bin_ for bin_ in map(read_bin, values) if bin_ is not None)",
        new="    return tuple(bin_ for bin_ in map(read_bin, list(values)[::-1]) if bin_ is not None)",
    ),
    Fault(
        fault_id="images-from-the-working-directory",
        what="Relative image paths start at the working directory.",
        seam="data.place",
        old="    return os.path.abspath(image_root / image)",
        new="    return os.path.abspath(image)",
    ),
    Fault(
        fault_id="image-size-unchecked",
        what="Width and height are believed.",
        seam="data.image",
        old="    if size is not None and found != size:",
        new="    if False:",
    ),
    Fault(
        fault_id="empty-box-is-data",
        what="A box without area is an object.",
        seam="data.geometry",
        old="    if right <= left or bottom <= top:",
        new="    if right < left or bottom < top:",
    ),
    Fault(
        fault_id="narrow-box-refused",
        what="A box of one bin's width is refused.",
        seam="data.geometry",
        old="    if right <= left or bottom <= top:",
        new="    if right <= left + 1 or bottom <= top + 1:",
    ),
    Fault(
        fault_id="first-shape-taken",
        what="Of two shapes the first is taken.",
        seam="data.geometry",
        old="    return found[0] if len(found) == 1 else None",
        new="    return found[0] if found else None",
    ),
    Fault(
        fault_id="description-with-line-break",
        what="A description may hold anything.",
        seam="data.record",
        old='        yield from check_desc(item.get("desc"), key=key, place=name)\n',
        new="",
    ),
    Fault(
        fault_id="bad-lines-left-out",
        what="Bad lines are left out without a word.",
        seam="data.jsonl",
        old="    if errors:\n        raise BadSamples(errors)",
        new="    if not samples:\n        raise BadSamples(errors)",
    ),
    Fault(
        fault_id="first-bad-line-only",
        what="Reading stops at the first bad line.",
        seam="data.jsonl",
        old="            errors += found\n",
        new="            raise BadSamples(found)\n",
    ),
    Fault(
        fault_id="order-from-the-clock",
        what="The order of the data is another one in every run.",
        seam="trainer",
        old="""        self.order = ReusedOrder(LearnerOrder(num_samples, seed=self.args.seed), shape)
        self.plan = WindowPlan(num_samples, seed=self.args.seed,""",
        new="""        clock = __import__("time").time_ns()
        self.order = ReusedOrder(LearnerOrder(num_samples, seed=clock), shape)
        self.plan = WindowPlan(num_samples, seed=clock,""",
    ),
    Fault(
        fault_id="order-without-seed",
        what="The seed does not change the order of the data.",
        seam="data.order",
        old="        generator = np.random.default_rng([self.seed, self.epoch])",
        new="        generator = np.random.default_rng([0, self.epoch])",
    ),
    Fault(
        fault_id="seeds-unrecorded",
        what="The seeds of requests are not written down.",
        seam="ring",
        old="            seeds=[request.seed for request in requests],",
        new="            seeds=[],",
    ),
    Fault(
        fault_id="seed-without-sample-index",
        what="All requests of a step have one seed.",
        seam="rollout.request",
        old="np.random.SeedSequence([run_seed, step, rank, index])",
        new="np.random.SeedSequence([run_seed, step, rank])",
    ),
    Fault(
        fault_id="seed-without-step",
        what="Every step has the same seeds.",
        seam="rollout.request",
        old="np.random.SeedSequence([run_seed, step, rank, index])",
        new="np.random.SeedSequence([run_seed, rank, index])",
    ),
    Fault(
        fault_id="seed-without-rank",
        what="Every rank has the same seeds.",
        seam="rollout.request",
        old="np.random.SeedSequence([run_seed, step, rank, index])",
        new="np.random.SeedSequence([run_seed, step, index])",
    ),
    Fault(
        fault_id="resume-begins-the-epoch-again",
        what="A resumed run begins its epoch again.",
        seam="launch.assemble",
        old='        "disable_tqdm": True,\n',
        new='        "disable_tqdm": True,\n        "ignore_data_skip": True,\n',
    ),
    Fault(
        fault_id="every-epoch-alike",
        what="Every epoch has the order of the first one.",
        seam="data.order",
        old="        self.epoch = epoch\n",
        new="        self.epoch = 0\n",
    ),
)
