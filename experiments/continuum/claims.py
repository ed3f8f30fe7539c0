"""The claims of Continuum (arXiv 2511.02230 v6), in the order in which they are shown, and its figures."""

from __future__ import annotations

from simcore.experiments.claims import Claim
from simcore.experiments.continuum.baselines import claim_c, claim_d, claim_j
from simcore.experiments.continuum.engines import claim_g, claim_h
from simcore.experiments.continuum.figures import figure_8, figure_14, figure_16
from simcore.experiments.continuum.mechanism import claim_a, claim_b, claim_e, claim_f, claim_i
from simcore.experiments.reproduce import Figure

CLAIMS: list[Claim] = [
    claim_a(), claim_b(), claim_c(), claim_d(), claim_e(), claim_f(), claim_g(), claim_h(), claim_i(), claim_j(),
]
FIGURES: dict[int, Figure] = {8: figure_8(), 14: figure_14(), 16: figure_16()}
