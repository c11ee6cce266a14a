"""Update rules and the kernels that carry them out on the host, one pass over memory each.

Results depend on the values alone: the same bits for every split, alignment and number of threads, with
the master kept whole or split, and with or without numba.
"""

from outcore.optim.kernels.adagrad import AdagradRule, adagrad
from outcore.optim.kernels.adamw import AdamRule, adamw
from outcore.optim.kernels.codecs import Moments, codec
from outcore.optim.kernels.lion import LionRule, lion
from outcore.optim.kernels.master import Master, join_master, split_master
from outcore.optim.kernels.reductions import accumulate, add_mean, sum_of_squares, widen
from outcore.optim.kernels.rule import Plane, Planes, Rule
from outcore.optim.kernels.sgd import SGDRule, sgd
from outcore.optim.kernels.transform import GradTransform
from outcore.optim.kernels.workers import Workers, workers

__all__ = [
    "AdagradRule",
    "AdamRule",
    "GradTransform",
    "LionRule",
    "Master",
    "Moments",
    "Plane",
    "Planes",
    "Rule",
    "SGDRule",
    "Workers",
    "accumulate",
    "adagrad",
    "adamw",
    "add_mean",
    "codec",
    "join_master",
    "lion",
    "sgd",
    "split_master",
    "sum_of_squares",
    "widen",
    "workers",
]
