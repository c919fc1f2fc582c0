"""What scripts do with what cannot work as asked: one line on stderr and exit status 2, as argparse does."""

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path


def count(text: str) -> int:
    """A flag's whole number, 1 or more."""
    with contextlib.suppress(ValueError):
        if (number := int(text)) >= 1:
            return number
    raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 1 or more")


def pair(text: str) -> tuple[int, int]:
    """A flag's two such numbers: "16x250"."""
    try:
        first, second = map(count, text.split("x"))
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(f"{text!r} must be two whole numbers, 1 or more, such as 16x250") from None
    return first, second


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Turns the errors of what cannot work as asked into that line and exit status."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
