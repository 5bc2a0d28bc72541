"""Importing this module makes the asserts of tests that are imported later say what they compared, also in a rank.

pytest does this for the process that it runs in; a rank imports the same files (and the same rewritten bytecode).
"""

from __future__ import annotations

import sys

import pytest
from _pytest.assertion import rewrite, util
from _pytest.config import get_config

HELPERS = ("tests.support.parity", "tests.support.twins")


def install() -> None:
    """Does nothing where pytest has done it."""
    if any(isinstance(finder, rewrite.AssertionRewritingHook) for finder in sys.meta_path):
        return
    config = get_config()
    config.parse(["-p", "no:cacheprovider", "--noconftest", "-c", "/dev/null"])  # this puts the hook in place
    pytest.register_assert_rewrite(*HELPERS)

    def compare(op: str, left: object, right: object) -> str | None:
        """How two values differ, as the lines of an assertion's message."""
        for lines in config.hook.pytest_assertrepr_compare(config=config, op=op, left=left, right=right):
            return "\n~".join(line.replace("\n", "\\n") for line in lines).replace("%", "%%")
        return None

    util._reprcompare = compare


install()
