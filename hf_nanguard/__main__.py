"""The `nanguard` command, also as `python -m hf_nanguard`. Imports nothing before Ctrl-C is handled."""

import sys


def main() -> int:
    """Runs the command line and returns its exit code."""
    try:
        from .cli.main import main as run

        return run()
    except KeyboardInterrupt:
        print("nanguard: stopped by Ctrl-C.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
