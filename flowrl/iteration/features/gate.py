"""Weights of samples in gated anchors: GARDO (arXiv:2512.24138), `flowrl.credit.proxies`."""

from dataclasses import dataclass, replace

from flowrl.credit.proxies import GATE, ProxyGate, gate_of
from flowrl.credit.trackers import TRACKER
from flowrl.iteration.credit import CreditInput, Estimate, SampleCredit, estimating
from flowrl.iteration.stages import Stages
from flowrl.session.session import Session


@dataclass(frozen=True)
class GatedEstimate:
    """Adds the column GATE to the credit."""

    session: Session
    gate: ProxyGate
    inner: Estimate

    def __call__(self, inputs: CreditInput) -> SampleCredit:
        context = inputs.context
        if TRACKER in self.session.table:
            # `inner` gives this iteration's scores to the tracker, which changes its share.
            context = self.session.table[TRACKER].before(context)
        credit = self.inner(inputs)
        weights = self.gate.weights(inputs.scores, context, credit.mask.any(1))
        gated = {"gated": float((weights > 0).double().mean())}
        table = credit.table.with_value(GATE, weights[:, None])
        return replace(credit, table=table, metrics={**credit.metrics, **gated})


def wrap(stages: Stages, session: Session) -> Stages:
    gate = gate_of(session.algorithm.transforms)
    assert gate is not None, "`check_columns` asks for one"
    return estimating(stages, lambda inner: GatedEstimate(session, gate, inner))
