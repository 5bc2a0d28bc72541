"""Runs one program on two ranks and says what differs from plain torch; all that are known, without an argument.

The environment variable RANKS says another number of ranks.

python -m tests.fuzz.replay 'Program(steps=((Backward(), Snap()),))'
"""

from __future__ import annotations

import os
import sys
import tempfile

from tests.fuzz import known, program
from tests.fuzz.check import wrong
from tests.support.harness import Ranks


def main() -> None:
    given = [eval(text, vars(program)) for text in sys.argv[1:]]
    ranks = Ranks(int(os.environ.get("RANKS", 2)))
    for one in given or [found.program for found in known.FOUND]:
        print(program.brief(one))
        with tempfile.TemporaryDirectory() as folder:
            text = wrong(ranks, one, folder)
        print("\n".join(f"    {line}" for line in text.splitlines()) or "    right", flush=True)
    ranks.close(kill=True)


if __name__ == "__main__":
    main()
