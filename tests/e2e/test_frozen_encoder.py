"""An encoder that freezes over pictures that it has admitted: others encode them as soon as its silence is noticed, far
sooner than any timeout, which are what they are by default.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.conftest import CheckpointFactory
from tests.e2e.system import Oracle, System, picture, running_system, user
from tests.e2e.test_outages import ask_about, stopped_decoding, working_encoder
from tests.gateway_stack import eventually

NOTICED_S = 5  # three probes of half a second each, one a second
LEASE_S = 5  # for which a frozen encoder may still be believed to be encoding
SHORTEST_TIMEOUT_S = 60

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(checkpoint: CheckpointFactory) -> Path:
    return checkpoint("llava_clip_llama")


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model)


@pytest.fixture(scope="module")
def system(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    settings = {
        "DIPTYCH_GATEWAY_PROBE_TIMEOUT_S": "0.5",
        "DIPTYCH_ENGINE_MAX_IDLE_EMBEDDING_BYTES": "0",  # it has to fetch what is asked about again
    }
    with running_system(model, tmp_path_factory.mktemp("logs"), num_encoders=2, **settings) as running:
        yield running


def test_what_a_frozen_encoder_has_admitted_is_encoded_by_the_other(system: System, oracle: Oracle):
    """Two requests share the picture: neither is held up by the other's wait for the frozen encoder."""
    system.arrange()
    image = picture()
    questions = [ask_about(image), user("And here? ", image)]
    with ThreadPoolExecutor(2) as pool, ExitStack() as stack:
        with stopped_decoding(*system.encoders):
            answers = [pool.submit(system.ask, question) for question in questions]
            frozen = working_encoder(system)
            eventually(lambda: system.engine.metric("num_requests_running") == 2)
            stack.enter_context(frozen.paused())
        since = time.monotonic()
        for answer, question in zip(answers, questions, strict=True):
            assert answer.result().tokens == oracle.answer(question)
        assert time.monotonic() - since < NOTICED_S + LEASE_S + 5 < SHORTEST_TIMEOUT_S
    system.arrange()
    system.assert_serves()


def test_a_known_picture_that_only_a_frozen_encoder_holds_is_encoded_anew(system: System, oracle: Oracle):
    system.arrange()
    image = picture()
    with ThreadPoolExecutor(1) as pool:
        with stopped_decoding(*system.encoders):
            answer = pool.submit(system.ask, ask_about(image))
            holder = working_encoder(system)
        answer.result()
    system.cache.flush()
    with holder.paused():
        eventually(lambda: system.num_ready("vision_encoders") == 1, within_s=NOTICED_S)
        since = time.monotonic()
        again = user("Another question: ", image)
        assert system.ask(again).tokens == oracle.answer(again)
        assert time.monotonic() - since < 5
    system.arrange()
    system.assert_serves()


def test_the_only_encoder_is_waited_for_if_it_freezes_for_a_while(system: System, oracle: Oracle):
    system.arrange(num_encoders=1)
    question = ask_about(picture())
    [only] = [encoder for encoder in system.encoders if encoder.is_running]
    with ThreadPoolExecutor(1) as pool:
        with stopped_decoding(only):
            answer = pool.submit(system.ask, question)
            assert working_encoder(system) is only
            with only.paused():
                eventually(lambda: system.num_ready("vision_encoders") == 0, within_s=NOTICED_S)
                time.sleep(2)
                assert not answer.done()
        assert answer.result().tokens == oracle.answer(question)
    system.assert_serves()
