"""A large cluster is simulated by a part of it: a part with its share of the traffic answers as the whole does.

The balancer compares two engines at a time and an encoder works for itself, so an engine among thirty lives like one
among thousands. To play all of those takes hours, and a few requests on each would show none of them under its load.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from diptych.simulator.report import Figures

MAX_REPLICAS: Final = 32  # of the larger panel, or twice as many so that the smaller one has whole replicas


@dataclass(frozen=True, slots=True)
class Part:
    """So many replicas that stand for `whole`, (engines, encoders)."""

    engines: int
    encoders: int
    whole: tuple[int, int]

    @classmethod
    def of(cls, engines: int, encoders: int) -> Part:
        """The panels keep their proportion, but for one: encoders of which each serves more engines than are played
        are less busy here than they will be."""
        fewer, more = sorted((engines, encoders))
        if more <= MAX_REPLICAS:
            return cls(engines, encoders, (engines, encoders))
        share = Fraction(max(1, fewer * MAX_REPLICAS // more), fewer) if fewer else Fraction(MAX_REPLICAS, more)
        if engines > encoders:
            share = min(share, Fraction(2 * MAX_REPLICAS, engines))
        num_encoders = max(1, int(encoders * share)) if encoders else 0
        return cls(int(engines * share), num_encoders, (engines, encoders))

    def requests_per_s(self, of_whole: float) -> float:
        """The part's traffic: for each of its engines what it would have in the whole."""
        return of_whole * self.engines / self.whole[0]

    def of_whole(self, seen: Figures) -> Figures:
        """The whole's figures from the part's."""
        num_engines, num_encoders = self.whole
        scale = num_engines / self.engines
        per_encoder = scale * self.encoders / num_encoders if num_encoders else 1.0
        return {
            **seen,
            "output_tokens_per_s": seen["output_tokens_per_s"] * scale,
            "encoders_busy": seen["encoders_busy"] * per_encoder,
        }
