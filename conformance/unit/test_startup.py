"""Coming up without collections, and going down without taking objects down."""

import gc
import os
import shlex
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from rollmatch.startup import loading

THREADS_AND_EXIT_FUNCTIONS = """
import atexit, threading, time
from concurrent.futures import ThreadPoolExecutor
from rollmatch.startup import leave, loading

class Kept:
    def __del__(self):
        print("taken down")

with loading():
    kept = Kept()
atexit.register(print, "exit function")
pool = ThreadPoolExecutor()
pool.submit(int).result()  # its thread is idle and would be waited for for ever
threading.Thread(target=lambda: (time.sleep(0.3), print("thread"))).start()
print("begun")
"""


WAITING = "import threading; from rollmatch.startup import start_thread; start_thread(threading.Event().wait, name='x')"


def run(code):
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    return done.returncode, done.stdout.split("\n")[:-1]


def test_a_process_that_leaves_ends_its_threads_and_exit_functions_and_takes_nothing_down():
    assert run(THREADS_AND_EXIT_FUNCTIONS + "leave(7)") == (7, ["begun", "thread", "exit function"])


def test_work_in_the_background_does_not_keep_a_process_from_ending():
    assert run(WAITING) == (0, [])


def test_a_command_with_an_error_of_ours_shows_it_and_takes_nothing_down_either():
    code = "from rollmatch.startup import run_process\nimport sys\n"
    code += "sys.excepthook = lambda kind, error, trace: print(kind.__name__, error, trace is not None)\n"
    code += "run_process(lambda: {}['key'], with_traceback=False)"
    shown = "KeyError 'key' True"
    assert run(THREADS_AND_EXIT_FUNCTIONS + code) == (1, ["begun", shown, "thread", "exit function"])


def test_a_process_that_ends_otherwise_takes_all_down():
    assert run(THREADS_AND_EXIT_FUNCTIONS) == (0, ["begun", "thread", "exit function", "taken down"])


AS_PROCESS = """
import os, signal
from rollmatch.startup import run_process
def command():
    print("\u6a21")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.kill(os.getpid(), signal.SIGINT)
run_process(command, with_traceback=False)
"""


def test_a_command_prints_in_any_locale_and_ctrl_c_is_no_traceback():
    done = subprocess.run(
        [sys.executable, "-c", AS_PROCESS],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    expected = (128 + signal.SIGINT, "\\u6a21\n", "rollmatch: stopped by Ctrl-C\n")
    assert (done.returncode, done.stdout, done.stderr) == expected


def test_what_was_loaded_is_left_alone_by_the_collector_until_an_ordinary_end():
    code = "import atexit, gc\nfrom rollmatch.startup import loading\n"
    code += "atexit.register(lambda: print(gc.get_freeze_count()))\n"
    code += "with loading(): pass\nprint(gc.get_freeze_count())\n"
    code += "with loading(): import colorsys\nprint(gc.get_freeze_count() > 1000)"
    assert run(code) == (0, ["0", "True", "0"])


@pytest.mark.parametrize("was_collecting", [True, False])
def test_the_collector_waits_while_loading_and_is_then_as_before(was_collecting):
    before = gc.isenabled()
    try:
        (gc.enable if was_collecting else gc.disable)()
        inside = load_nothing()
        assert (inside, gc.isenabled()) == (False, was_collecting)
    finally:
        (gc.enable if before else gc.disable)()


def load_nothing():
    """Whether the collector works meanwhile."""
    with suppress(ImportError), loading():
        seen = gc.isenabled()
        raise ImportError("an installation without it")
    return seen


UNNEEDED = """
import sys
from rollmatch.startup import loading

with loading():
    import transformers.generation.candidate_generator
    import transformers.trainer
assert not {"datasets", "pandas", "scipy.stats", "sklearn"} & sys.modules.keys()
import datasets, sklearn.metrics
with loading():
    import datasets, sklearn
print(sklearn.metrics.roc_curve.__name__, datasets.Dataset.__name__)
"""


@pytest.mark.wide
def test_what_transformers_loads_for_nothing_is_left_out_while_loading_and_there_afterwards():
    assert run(UNNEEDED) == (0, ["roc_curve Dataset"])


PRINTING = """
import sys, time
from rollmatch.startup import run_process

def command():
    for _ in range(200):
        print("x" * 1000, flush=True)
        print("y", file=sys.stderr)
    with open(sys.argv[1], "w") as file:
        file.write("whole")
    return 5

run_process(command, with_traceback=False)
"""


@pytest.mark.parametrize("streams", ["stdout", "stdout stderr"])
def test_a_command_whose_reader_is_gone_goes_on_to_its_end(tmp_path, streams):
    """``| head``, or a terminal that was closed: a learner was killed without a checkpoint."""
    pipes = dict.fromkeys(streams.split(), subprocess.PIPE)
    process = subprocess.Popen([sys.executable, "-c", PRINTING, str(tmp_path / "end")], **pipes)
    for name in pipes:
        getattr(process, name).close()
    assert process.wait(timeout=60) == 5
    assert (tmp_path / "end").read_text() == "whole"


CLOSED = """
import os, sys
from rollmatch.startup import run_process

def command():
    with open(sys.argv[1], "w") as file:
        os.write(1, b"as a library in C does")
        os.write(2, b"as a library in C does")
        print("x")
        print("y", file=sys.stderr)
        file.write("whole")
    return 5

run_process(command, with_traceback=False)
"""


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_no_file_gets_what_is_written_to_a_closed_stream(tmp_path, closed):
    command = shlex.join([sys.executable, "-c", CLOSED, str(tmp_path / "end")])
    process = subprocess.run(["bash", "-c", f"{command} {closed}"], capture_output=True, text=True, timeout=60)
    assert (process.returncode, (tmp_path / "end").read_text()) == (5, "whole")
    assert "Traceback" not in process.stderr


FAILING = """
import logging, threading, warnings
from rollmatch.startup import run_process

def fail():
    try:
        raise OSError("no route to http://me:sesame@node7/a?token=sesame")
    except OSError as error:
        raise ValueError("Illegal header value b'Bearer sesame'") from error

def command():
    warnings.warn("retrying https://me:sesame@node7")
    warnings.warn("the token is hf_" + "a1B2" * 8)
    logging.warning("the value of the variable is open-sesame")
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    fail()

run_process(command, with_traceback=True)
"""


def test_tracebacks_and_warnings_of_a_command_hold_no_credentials():
    environment = os.environ | {"SOME_API_KEY": "open-sesame"}
    done = subprocess.run(
        [sys.executable, "-c", FAILING], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr.count("ValueError: Illegal header value b'Bearer ***'") == 2
    assert done.stderr.count("OSError: no route to http://***@node7/a?token=***") == 2
    assert "retrying https://***@node7" in done.stderr
    assert "the token is hf_***" in done.stderr
    assert "the value of the variable is ***" in done.stderr
