"""When outputs are equal."""

import pytest

from qerl.sandbox.compare import outputs_match


@pytest.mark.parametrize(
    ("expected", "actual", "equal"),
    [
        ("1\n2\n", "1\n2\n", True),
        ("1\n2\n", "1  \n2\t\r\n\n\n", True),
        ("1\n2", "1 2", False),
        ("1 2", "1  2", False),
        ("1", " 1", False),
        ("\n1", "1", False),
        ("1\n\n2", "1\n2", False),
        ("YES", "yes", False),
        ("1", "1.0", False),
        ("", "\n", True),
        ("", "0", False),
        ("0.5", "0.5000000001", False),
        # form feeds and the like are no line ends
        ("a\x0cb", "a\nb", False),
    ],
)
def test_exact(expected, actual, equal):
    assert outputs_match(expected, actual) is equal


@pytest.mark.parametrize(
    ("expected", "actual", "equal"),
    [
        ("0.5 x", "0.5000009  x", True),
        ("0.5", "0.50001", False),
        ("1000000", "1000000.5", True),
        ("1000000", "1000002", False),
        ("1 2", "1\n2", False),
        ("1 2", "1 2 3", False),
        ("x", "y", False),
        ("1", "nan", False),
        ("1", "inf", False),
        ("inf", "1e400", False),
        ("nan", "nan", True),
    ],
)
def test_with_a_tolerance_of_a_millionth(expected, actual, equal):
    assert outputs_match(expected, actual, 1e-6) is equal
