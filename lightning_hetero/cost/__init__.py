"""The cost of work on a machine: op and hardware → seconds and bytes. The only place with rates."""

from lightning_hetero.cost.rates import LANES, Demand, Rates, Work, cpu_update_bytes
from lightning_hetero.cost.work import Amount, amount_of, backward_s, stored_bytes, update_amount

__all__ = [
    "LANES",
    "Amount",
    "Demand",
    "Rates",
    "Work",
    "amount_of",
    "backward_s",
    "cpu_update_bytes",
    "stored_bytes",
    "update_amount",
]
