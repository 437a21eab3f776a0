"""The regular expressions that PEFT builds out of config fields; each may fail to compile.

Source: `get_pattern_key` in peft/utils/other.py and `check_target_module_exists` in peft/tuners/tuners_utils.py.
"""

import re


def whole_name(pattern: str) -> re.Pattern[str]:
    """target_modules or exclude_modules as a string; for `fullmatch`."""
    return re.compile(pattern)


def end_of_name(key: str) -> re.Pattern[str]:
    """A key of rank_pattern or alpha_pattern; for `match`."""
    return re.compile(rf"(.*\.)?({key})$")


def layer_index(container: str | None) -> re.Pattern[str]:
    """The group "idx" is the number behind the container of the layers, or behind the first name; for `match`."""
    before = r".*?\.[^.]*" if container is None else rf"(?:^|.*?\.){container}"
    return re.compile(rf"{before}\.(?P<idx>\d+)\.")
