"""The normal form of an adapter, and the rules that hold for it. Knows neither PEFT nor vLLM."""

from scute.algebra.evaluate import evaluate
from scute.algebra.fold import Fold, fold, live_slots
from scute.algebra.form import AdapterForm, Bias, Member, Owner, Rotation, SharedPair, Term, column_norms
from scute.algebra.members import Row, ssf, table1
from scute.algebra.stack import stack

__all__ = [
    "AdapterForm",
    "Bias",
    "Fold",
    "Member",
    "Owner",
    "Rotation",
    "Row",
    "SharedPair",
    "Term",
    "column_norms",
    "evaluate",
    "fold",
    "live_slots",
    "ssf",
    "stack",
    "table1",
]
