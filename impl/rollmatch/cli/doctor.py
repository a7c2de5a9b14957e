"""``rollmatch doctor``: its options."""

import argparse


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command with its options."""
    parser = commands.add_parser("doctor", help="check this machine and its packages")
    parser.add_argument("--fix", action="store_true", help="repair problems that can be repaired")
    parser.set_defaults(command=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from rollmatch.launch.doctor import doctor

    return doctor(fix=options.fix)
