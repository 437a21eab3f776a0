"""The normal form of an adapter, and the rules that hold for it. Knows neither PEFT nor vLLM."""

from scute.algebra.adapted import adapted
from scute.algebra.evaluate import evaluate
from scute.algebra.fold import Fold, fold, live_slots
from scute.algebra.form import AdapterForm, Bias, Member, Owner, Rotation, SharedPair, Term, column_norms
from scute.algebra.low_rank import rank_of_exact_fold, scale_left_out, share_left_out, truncated_svd
from scute.algebra.members import Row, ssf, table1
from scute.algebra.stack import Obstacle, obstacle, stack, stack_forms, stacked_method, stacked_rank
from scute.algebra.update import update

__all__ = [
    "AdapterForm",
    "Bias",
    "Fold",
    "Member",
    "Obstacle",
    "Owner",
    "Rotation",
    "Row",
    "SharedPair",
    "Term",
    "adapted",
    "column_norms",
    "evaluate",
    "fold",
    "live_slots",
    "obstacle",
    "rank_of_exact_fold",
    "scale_left_out",
    "share_left_out",
    "ssf",
    "stack",
    "stack_forms",
    "stacked_method",
    "stacked_rank",
    "table1",
    "truncated_svd",
    "update",
]
