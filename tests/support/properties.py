"""How many examples a property tries; the profiles are in conftest.py."""

from __future__ import annotations

from hypothesis import settings

QUICK_EXAMPLES, DEEP_EXAMPLES = 60, 2000


def examples(count: int) -> settings:
    """Settings of a property that is costly: so many examples in the quick profile, in proportion
    more in the deep one.
    """
    return settings(max_examples=count * settings.default.max_examples // QUICK_EXAMPLES)
