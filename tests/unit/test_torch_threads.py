"""Torch's threads: many where a service computes, one everywhere else, whoever sets what first."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from shared.torch_threads import compute_alone_elsewhere, compute_with

pytestmark = pytest.mark.usefixtures("own_thread_count")


@pytest.fixture
def own_thread_count():
    before = torch.get_num_threads()
    yield
    compute_with(before)


def test_only_the_thread_that_computes_has_many():
    with ThreadPoolExecutor(1, initializer=compute_with, initargs=(3,)) as engine, ThreadPoolExecutor(1) as worker:
        engine.submit(int).result()
        compute_alone_elsewhere()
        assert torch.get_num_threads() == 1
        assert worker.submit(torch.get_num_threads).result() == 1
        assert engine.submit(torch.get_num_threads).result() == 3


def test_what_another_thread_sets_later_changes_nothing():
    with ThreadPoolExecutor(1, initializer=compute_with, initargs=(2,)) as engine:
        engine.submit(int).result()
        compute_with(1)
        with ThreadPoolExecutor(1, initializer=compute_with, initargs=(4,)) as other:
            other.submit(int).result()
            assert torch.get_num_threads() == 1
            assert engine.submit(torch.get_num_threads).result() == 2
