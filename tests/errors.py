"""Errors of what was computed."""


def rms_error(found, expected):
    """Relative root mean square, in double precision."""
    expected = expected.double()
    return ((found.double() - expected).square().mean() / expected.square().mean()).sqrt().item()
