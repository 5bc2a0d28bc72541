"""Builds the C++ extension ahead of its first use: ``python -m lightning_zerocompile.build``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lightning_zerocompile.runtime import build


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; prints where the library is and returns 0, or says why there is none and returns 1."""
    parser = argparse.ArgumentParser(
        prog="python -m lightning_zerocompile.build",
        description="Builds the C++ extension, if that is not done yet, loads it and prints where it is. The folder is "
        f"chosen by {build.CACHE_VARIABLE}.",
    )
    parser.parse_args(arguments)
    try:
        binary = build.binary()
        build.import_binary(build.MODULE, binary)
    except build.ExtensionBuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(binary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
