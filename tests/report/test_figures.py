"""Numbers of a plan on the terminal."""

from __future__ import annotations

import pytest

from outcore.report.plans import figure, lifetime


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (1691.78, "1,692"),
        (345.85, "346"),
        (11.76, "11.8"),
        (0.0123, "0.0123"),
        (0.0, "0"),
        (9.17e-4, "0.000917"),
        (2e-5, "<0.0001"),
    ],
)
def test_figures_have_no_exponent(value: float, said: str) -> None:
    assert figure(value) == said


def test_a_disk_of_days_is_not_told_of_in_years() -> None:
    assert lifetime(0.031) == "11 days"
    assert lifetime(2.5) == "2.5 years"
