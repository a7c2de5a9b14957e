"""Arguments of every command that reads a YAML."""

import argparse


def add_config(parser: argparse.ArgumentParser, command: object) -> argparse.ArgumentParser:
    """Add the YAML and ``--set``, and what runs; returns the parser."""
    parser.add_argument("config", metavar="CONFIG", help="YAML file")
    text = "override one key of the YAML; can be repeated"
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="a.b=VALUE", help=text)
    parser.set_defaults(command=command)
    return parser
