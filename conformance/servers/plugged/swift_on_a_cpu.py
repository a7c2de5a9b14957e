"""``swift rollout``, but its check of the arguments counts one device where there is none."""

import sys

from swift.arguments import deploy_args


def main():
    """The command, with its own arguments."""
    deploy_args.get_device_count = lambda: 1
    from swift.pipelines import rollout_main

    rollout_main()


if __name__ == "__main__":
    sys.exit(main())
