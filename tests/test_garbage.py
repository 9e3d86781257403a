"""While libraries are imported nothing is looked at for garbage, and what they bring along never again."""

import gc
import weakref

import pytest

from hybridflow import garbage


class Ring:
    """Garbage that only the collector finds, once nobody holds it."""

    def __init__(self):
        self.itself = self


def test_what_was_imported_is_left_alone_and_the_rest_is_not():
    try:
        with garbage.none_yet():
            assert not gc.isenabled()
            imported = Ring()
        assert gc.isenabled() and gc.get_freeze_count() > 0
        kept, later = weakref.ref(imported), weakref.ref(Ring())
        del imported
        gc.collect()
        assert kept() is not None and later() is None
    finally:
        gc.unfreeze()
    gc.collect()
    assert kept() is None


def test_a_failed_import_and_one_within_another():
    try:
        with pytest.raises(ImportError), garbage.none_yet():
            raise ImportError
        assert gc.isenabled()
        with garbage.none_yet():
            with garbage.none_yet():
                pass
            assert not gc.isenabled()
        assert gc.isenabled()
    finally:
        gc.unfreeze()
