"""What malloc is told, seen in processes of their own: no two tests of one process could tell it different things."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.tiny_tokenizer import build_tokenizer

pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_info"), reason="this C library's malloc has no arenas"
)

NUM_ARENAS: Final = """
import ctypes, re, threading
from shared.malloc import limit_arenas

limit_arenas()
barrier = threading.Barrier(6)
threads = [threading.Thread(target=barrier.wait) for _ in range(6)]
for thread in threads: thread.start()
for thread in threads: thread.join()
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
libc.fclose.argtypes = [ctypes.c_void_p]
libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
report = libc.fopen(b"/dev/stdout", b"w")
libc.malloc_info(0, report)
libc.fclose(report)
"""

KIB_AFTER_LONG_TEXT: Final = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import torch
from services.text_engine.tokenizer import LONG_TEXT, Tokenizer

def kib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 10

tokenizer = Tokenizer.load(Path(sys.argv[1]))
torch.empty(20 << 20, dtype=torch.uint8)  # as loading a model does: malloc then returns less by itself
before = kib()
with ThreadPoolExecutor(1) as pool:
    num_tokens = len(pool.submit(tokenizer.encode, "word " * (LONG_TEXT // 5 + 1), add_special_tokens=False).result())
    print(num_tokens, kib() - before)
"""


def printed(code: str, *arguments: str, **env: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=kept | env, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


def test_threads_share_two_arenas():
    assert printed(NUM_ARENAS).count("<heap nr=") == 2


def test_an_operators_number_of_arenas_is_left_alone():
    assert printed(NUM_ARENAS, MALLOC_ARENA_MAX="4").count("<heap nr=") == 4


def test_what_a_long_prompt_took_is_given_back(tmp_path: Path):
    build_tokenizer(with_image_token=False).backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    num_tokens, kib = map(int, printed(KIB_AFTER_LONG_TEXT, str(tmp_path)).split())
    assert num_tokens > 50_000
    assert kib < 40 << 10  # without it more than 60 MiB
