import pytest

from ensemblayers.ops import mix_next, native


@pytest.fixture(params=["plain", "native"])
def backend(request, monkeypatch):
    """Each backend in turn; the native one has to be there, or its tests show nothing."""
    if request.param == "plain":
        monkeypatch.setattr(mix_next, "_in_cpp", lambda vertices, params: False)
    elif not native.available():
        pytest.skip("no C++ compiler")
    return request.param


@pytest.fixture
def native_only():
    if not native.available():
        pytest.skip("no C++ compiler")
