"""The file that puts Compose's panels on GPUs changes the panels alone, and by settings that exist."""

from __future__ import annotations

from pathlib import Path

import yaml

from services.text_engine.config import TextEngineSettings
from services.vision_encoder.config import VisionEncoderSettings
from shared.settings import env_name

ROOT = Path(__file__).resolve().parents[2]
BASE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
GPU = yaml.safe_load((ROOT / "docker-compose.gpu.yml").read_text())["services"]
SETTINGS = {"text_engine": TextEngineSettings, "vision_encoder": VisionEncoderSettings}


def test_both_panels_get_a_gpu_and_nobody_else_does():
    assert set(GPU) == set(SETTINGS)
    for name, service in GPU.items():
        assert name in BASE
        [device] = service["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
        assert service["environment"][env_name(SETTINGS[name], "device")] == "cuda"


def test_cuda_images_have_names_of_their_own_and_arguments_that_the_dockerfile_knows():
    for name, service in GPU.items():
        assert service["image"] == BASE[name]["image"] + "-cuda"
        dockerfile = (ROOT / BASE[name]["build"]["dockerfile"]).read_text()
        for argument in service.get("build", {}).get("args", {}):
            assert f"ARG {argument}=" in dockerfile
