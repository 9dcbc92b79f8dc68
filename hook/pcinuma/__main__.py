"""``python -m pcinuma`` is the ``pcinuma`` command."""

from pcinuma.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
