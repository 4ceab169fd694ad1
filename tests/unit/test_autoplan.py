"""When a new plan is called for: drifts that last, patience that grows, and differences that no
plan removes.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.machines import HARDWARE

from lightning_hetero.callbacks import PredictionError, num_tokens
from lightning_hetero.errors import PlanError
from lightning_hetero.ir.hardware import HardwareProfile
from lightning_hetero.ir.model import BlockProfile, ModelProfile
from lightning_hetero.ir.plan import BlockPlan, Plan, Prediction
from lightning_hetero.planners import BUILTIN_PLANS
from lightning_hetero.planning.autoplan import Autoplan, BatchSize, Stage
from lightning_hetero.planning.fit_planning import FitPlanning, scaled
from lightning_hetero.planning.machine_profile import Machine
from lightning_hetero.runtime.options import StepRules
from lightning_hetero.store.capacity import resident_bytes

GIB = 2**30
PROFILED = [Stage.RECORD, Stage.TIME, Stage.TIME, Stage.TIME]


def plan(seconds: float = 1.0, name: str = "p") -> Plan:
    predicted = Prediction(
        iteration_s=seconds, forward_s=seconds / 3, backward_s=2 * seconds / 3, device_peak_bytes=100, host_peak_bytes=200,
        disk_bytes=0, bottleneck={},
    )  # fmt: skip
    return Plan(name=name, blocks=(BlockPlan(name="b"),), predicted=predicted)


class Session:
    """A budget and a plan in force."""

    def __init__(self) -> None:
        self.budget = 8 * GIB
        self.present_bytes, self.resident_meter = 0, resident_bytes
        self.device_memory = None
        self.on_disk = False
        lanes = SimpleNamespace(allocated_bytes=lambda: 0)
        speculation = SimpleNamespace(enabled=False)
        self.running = self.executor = SimpleNamespace(plan=plan(0.0, "provisional"), speculation=speculation, lanes=lanes)

    def host_memory(self) -> int:
        return self.budget

    def replan(self, wanted: Plan) -> Plan:
        self.executor.plan = wanted
        return wanted


class Driver:
    """Runs batches through an Autoplan whose planning gives the plans in turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, plans: list[Plan], *, drift: float | None = 0.5) -> None:
        machine: Any = SimpleNamespace(profile=self.hardware, is_given=False)
        self.auto = Autoplan("holistic", machine, drift=drift)
        self.asked: list[dict[str, bool]] = []  # of the machine
        self.given: list[HardwareProfile] = []  # to the search
        self.explains: tuple[float, Plan] | None = None  # what corrected rates would say
        self.again_s = 100.0  # what the plan in force takes by blocks that were timed again
        self.memory_suffices = True
        self.session: Any = Session()
        self.made = 0
        self.stages: list[Stage] = []

        def search(_: FitPlanning, hardware: HardwareProfile, **options: Any) -> tuple[Plan, Any]:
            self.given.append(hardware)
            if not self.memory_suffices and not self.asked[-1]["disk"]:
                raise PlanError("too little memory", tier="host")
            self.made += 1
            return plans[min(self.made, len(plans)) - 1], hardware

        monkeypatch.setattr(FitPlanning, "search", search)
        monkeypatch.setattr(FitPlanning, "refined", lambda *a, **k: self.explains)
        monkeypatch.setattr(FitPlanning, "iteration_s", lambda *a, **k: self.again_s)
        monkeypatch.setattr(self.auto, "_profile", lambda session: SimpleNamespace(tokens=self.tokens))
        profiler = SimpleNamespace(start=lambda: None, stop=lambda: object())
        monkeypatch.setattr("lightning_hetero.planning.autoplan.BatchProfiler", lambda *a, **k: profiler)
        self.tokens = 100

    def hardware(self, session: Any, **how: bool) -> HardwareProfile:
        self.asked.append(how)
        return HARDWARE

    def steps(self, number: int, seconds: float = 1.0, *, tokens: int = 100) -> None:
        self.tokens = tokens
        for _ in range(number):
            self.auto.before_batch(self.session, BatchSize(tokens=tokens, micro_batches=1))
            self.stages.append(self.auto.stage)
            self.auto.after_batch()
            self.auto.after_step(self.session, seconds)


def test_four_batches_are_profiled_then_a_plan_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, [plan()])
    driver.steps(100)
    assert driver.stages[:5] == [*PROFILED, Stage.RUN]
    assert driver.made == 1


def test_a_step_that_stays_slow_is_timed_and_planned_anew_once(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """The new plan is the old one, so two seconds are what is expected from then on."""
    caplog.set_level(logging.INFO, "lightning_hetero")
    driver = Driver(monkeypatch, [plan()])
    driver.steps(len(PROFILED))
    driver.steps(200, 2.0)
    assert driver.made == 2
    assert driver.stages.count(Stage.TIME) == 2 * 3
    assert driver.stages.count(Stage.RECORD) == 1
    assert sum("a step takes 2 s, expected were 1 s" in r.getMessage() for r in caplog.records) == 1


def test_a_machine_that_steps_contradict_is_measured_again_once(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, [plan(), plan(2.5, "slower"), plan(1.0, "quicker")])
    driver.steps(30)
    assert [how["again"] for how in driver.asked] == [False]
    driver.steps(40, 2.5)
    assert [how["again"] for how in driver.asked] == [False, True]
    driver.steps(100, 1.0)
    assert driver.made == 3
    assert [how["again"] for how in driver.asked] == [False, True, False]


def test_a_machine_is_not_to_blame_for_blocks_that_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, [plan(), plan(2.0, "slower")])
    driver.steps(30)
    driver.again_s = 2.1
    driver.steps(40, 2.0)
    assert driver.made == 2
    assert not any(how["again"] for how in driver.asked)


@pytest.mark.parametrize(("quicker", "name"), [(0.97, "new"), (0.99, "p")])
def test_the_first_steps_correct_the_machine_once(quicker: float, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another plan comes into force if it is quicker at the rates that steps have shown; neither is
    measured again.
    """
    driver = Driver(monkeypatch, [plan(), plan(1.3 * quicker, "new")])
    driver.explains = 0.5, plan(1.3)
    driver.steps(len(PROFILED) + 1 + 5, 1.3)
    assert driver.made == 1
    driver.steps(1, 1.3)
    assert driver.made == 2
    assert driver.session.executor.plan.name == name
    assert driver.session.executor.plan.predicted.iteration_s == (1.3 * quicker if name == "new" else 1.3)
    assert driver.given[1].disk_read_bytes_per_s == 0.5 * HARDWARE.disk_read_bytes_per_s
    assert driver.given[1].device_flop_per_s == HARDWARE.device_flop_per_s
    driver.steps(100, 1.5)
    assert driver.made == 2
    assert driver.stages.count(Stage.TIME) == 3
    assert not any(how["again"] for how in driver.asked)


def test_small_differences_and_those_that_rates_do_not_explain_correct_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for explains, seconds in (((0.9, plan(1.1)), 1.1), (None, 1.4)):
        driver = Driver(monkeypatch, [plan(), plan(1.0, "new")])
        driver.explains = explains
        driver.steps(100, seconds)
        assert driver.made == 1


def test_the_disk_is_measured_only_if_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, [plan()])
    driver.steps(10)
    assert [how["disk"] for how in driver.asked] == [False]
    lacking = Driver(monkeypatch, [plan()])
    lacking.memory_suffices = False
    lacking.steps(10)
    assert [how["disk"] for how in lacking.asked] == [False, True]
    on_disk = Driver(monkeypatch, [plan()])
    on_disk.session.on_disk = True
    on_disk.steps(10)
    assert [how["disk"] for how in on_disk.asked] == [True]


def test_a_few_slow_steps_are_no_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, [plan()])
    driver.steps(len(PROFILED))
    for _ in range(20):
        driver.steps(8, 1.0)
        driver.steps(2, 9.0)
    assert driver.made == 1


def test_steps_in_turns_do_not_make_plans_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Phases that last and plans that differ each time: twice as many steps pass before another
    plan.
    """
    plans = [Plan(name=str(i), blocks=(BlockPlan(name=f"b{i}"),), predicted=plan().predicted) for i in range(50)]
    driver = Driver(monkeypatch, plans)
    driver.steps(len(PROFILED))
    for _ in range(40):
        driver.steps(25, 3.0)
        driver.steps(25, 1.0)
    assert 2 < driver.made <= 8  # 2000 steps: 16, 32, 64, ... apart


def test_differences_that_no_planning_is_worth_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, [plan(0.001)])
    driver.steps(100, 0.01)
    assert driver.made == 1


def test_longer_batches_are_recorded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, [plan()])
    driver.steps(10)
    for _ in range(10):
        driver.steps(4, tokens=300)  # not long enough
        driver.steps(1)
    assert driver.made == 1
    driver.steps(10, tokens=300)
    assert driver.made == 2
    assert driver.stages.count(Stage.RECORD) == 2
    driver.steps(50, tokens=310)
    assert driver.made == 2


def test_less_memory_is_planned_with_at_once(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    caplog.set_level(logging.INFO, "lightning_hetero")
    driver = Driver(monkeypatch, [plan(), plan(1.0, "smaller")])
    driver.steps(30)
    driver.session.budget = 3 * GIB
    driver.steps(30)
    assert driver.made == 2
    assert driver.stages.count(Stage.TIME) == 3
    assert any("the budget of host memory is 3.0 GiB, the plan is for 8.0 GiB" in r.getMessage() for r in caplog.records)


def test_without_a_threshold_only_requests_count(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, [plan()], drift=None)
    driver.steps(40, 5.0)
    driver.session.budget = GIB
    driver.steps(40, 5.0, tokens=900)
    assert driver.made == 1
    driver.auto.request()
    driver.steps(3)
    assert driver.made == 1
    driver.steps(1)
    assert driver.made == 2
    driver.auto.request(budget=True)
    assert driver.auto.stage is Stage.PLAN
    driver.steps(1)
    assert driver.made == 3


def test_a_request_while_profiling_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, [plan()])
    driver.steps(1)
    driver.auto.request()
    driver.steps(5)
    assert driver.stages[:5] == [*PROFILED, Stage.RUN]
    assert driver.made == 1


def test_prediction_errors_are_relative_to_measurements() -> None:
    error, prediction = PredictionError(), plan(1.0).predicted
    assert prediction is not None
    assert error.compute() == {}
    error.update(prediction, 2.0, 0)
    assert error.compute() == {"step_time_error": pytest.approx(0.5)}
    error.update(prediction, 0.5, 400)
    assert error.compute() == {"step_time_error": pytest.approx((0.5 + 1.0) / 2), "host_peak_error": pytest.approx(0.5)}


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        ({"labels": torch.zeros(3), "input_ids": torch.zeros(2, 7, dtype=torch.long)}, 14),
        ([torch.zeros(2, 7, dtype=torch.long), torch.zeros(2)], 14),
        ((torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.long)), 4),
        (torch.zeros(5, 9), 5),
        (torch.tensor(1.0), 1),
        ("text", 1),
        ([], 1),
        (torch.zeros(0, 3), 1),
    ],
)
def test_tokens_of_a_batch(batch: Any, tokens: int) -> None:
    assert num_tokens(batch) == tokens


def test_after_a_lack_of_device_memory_batches_are_recorded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what a plan from the profile lacked is kept clear of: before there was one, nobody knew
    what a batch takes.
    """
    driver = Driver(monkeypatch, [plan()])
    driver.steps(2)
    driver.auto.demoted(torch.OutOfMemoryError("too small"), 64 * GIB)
    assert (driver.auto.stage, driver.auto._short_bytes) == (Stage.RECORD, 0)
    driver.steps(10)
    assert driver.stages == [*PROFILED[:2], *PROFILED, *[Stage.RUN] * 6]
    driver.auto.demoted(torch.OutOfMemoryError("too small"), 64 * GIB)
    short = driver.auto._short_bytes
    assert short == 2 * GIB
    driver.auto.demoted(torch.OutOfMemoryError("still too small"), 64 * GIB)
    assert driver.auto._short_bytes == short, "the lesser plan was not made from a profile"
    driver.steps(6)
    assert driver.stages[-6:] == [*PROFILED, Stage.RUN, Stage.RUN]
    assert driver.made == 2


def planning_for(model: ModelProfile) -> FitPlanning:
    """Predictions need to know one thing of a session: how its training loop runs."""
    session: Any = SimpleNamespace(rules=StepRules())
    return FitPlanning(session, model, 1)


@pytest.mark.parametrize("scale", [0.05, 0.4, 1.0, 2.5, 30.0])
@pytest.mark.parametrize("name", ["disk", "host"])
def test_rates_are_corrected_to_step_times(name: str, scale: float) -> None:
    blocks = tuple(
        BlockProfile(
            name=f"b{i}",
            num_params=10**7,
            num_trainable_params=10**7,
            forward_s=1e-3,
            backward_s=2e-3,
            forward_flop=1e9,
            activation_bytes=10**6,
            boundary_bytes=10**5,
            transient_bytes=10**5,
        )
        for i in range(4)
    )
    model = ModelProfile(name="m", tokens=100, compute_itemsize=4, constant_device_bytes=0, constant_host_bytes=0, blocks=blocks)
    plan = BUILTIN_PLANS[name](model.shape())
    planning = planning_for(model)
    step_s = planning.iteration_s(plan, scaled(HARDWARE, scale))
    found = planning.refined(plan, HARDWARE, step_s=step_s)
    assert found is not None
    assert found[0] == pytest.approx(scale, rel=0.01)
    assert found[1].predicted is not None
    assert found[1].predicted.iteration_s == pytest.approx(step_s, rel=0.01)
    assert planning.refined(plan, HARDWARE, step_s=1e-3) is None, "less than compute alone"


def test_a_given_profile_that_steps_contradict_stays_and_a_warning_says_so(caplog: pytest.LogCaptureFixture) -> None:
    session: Any = SimpleNamespace(options=SimpleNamespace(device=None))
    machine = Machine(HARDWARE)
    assert machine.profile(session) == HARDWARE
    assert caplog.text == ""
    assert machine.profile(session, again=True) == HARDWARE
    assert "It was given, so the machine is not measured" in caplog.text
