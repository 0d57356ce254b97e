"""Rules of the games, and exact exploitability against independent enumeration and known values."""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.records import Observation
from sandboxes.games import KuhnPoker, TicTacToeGame
from sandboxes.games.exploitability import Policy, best_response_value, exploitability, game_value, views
from sandboxes.games.rules import CHANCE, Kuhn, State, TicTacToe

KUHN = [state.view for state in views(Kuhn())]


def of_bets(bets: Mapping[str, float]) -> Policy:
    return lambda state: {"b": bets[state.view], "p": 1 - bets[state.view]}


def equilibrium(bluff: float) -> Policy:
    """Returns an equilibrium (Kuhn 1950): the first player bets a jack with a probability of up to 1/3, and a king three times as often."""
    first = {
        "J moves -": bluff,
        "Q moves -": 0.0,
        "K moves -": 3 * bluff,
        "J moves pb": 0.0,
        "Q moves pb": bluff + 1 / 3,
        "K moves pb": 1.0,
    }
    second = {"J moves p": 1 / 3, "Q moves p": 0.0, "K moves p": 1.0, "J moves b": 0.0, "Q moves b": 1 / 3, "K moves b": 1.0}
    return of_bets({f"card {view}": bet for view, bet in (first | second).items()})


def uniform(state: State) -> dict[str, float]:
    return dict.fromkeys(state.actions, 1 / len(state.actions))


@pytest.mark.parametrize("bluff", [0.0, 0.1, 1 / 3])
def test_equilibria_of_kuhn_poker_are_not_exploitable_and_have_its_value(bluff: float) -> None:
    assert exploitability(Kuhn(), equilibrium(bluff)) == pytest.approx(0.0, abs=1e-12)
    assert game_value(Kuhn(), equilibrium(bluff)) == pytest.approx(-1 / 18)
    assert best_response_value(Kuhn(), equilibrium(bluff), 1) == pytest.approx(1 / 18)


@pytest.mark.slow
def test_known_values_of_the_uniform_policy() -> None:
    """NashConv of Kuhn poker is 11/12, as in OpenSpiel. At tic-tac-toe, a perfect player almost always beats a random one."""
    assert len(KUHN) == 12 and exploitability(Kuhn(), uniform) == pytest.approx(11 / 24)
    assert len(views(TicTacToe())) == 4520
    assert best_response_value(TicTacToe(), uniform, 0) == pytest.approx(0.99, abs=0.01)


@pytest.mark.slow
@given(st.lists(st.floats(0, 1), min_size=12, max_size=12))
def test_a_best_response_is_the_best_of_all_pure_strategies(bets: list[float]) -> None:
    """Compares with the value of each of the 64 pure strategies, computed by enumeration of the games."""
    policy = of_bets(dict(zip(KUHN, bets, strict=True)))
    for player in (0, 1):
        own = [view for view in KUHN if (len(view.split()[-1].replace("-", "")) % 2) == player]
        assert len(own) == 6
        gains = []
        for pure in product((0.0, 1.0), repeat=6):
            mixed = dict(zip(KUHN, bets, strict=True)) | dict(zip(own, pure, strict=True))
            gains.append(game_value(Kuhn(), of_bets(mixed)) * (1 if player == 0 else -1))
        assert best_response_value(Kuhn(), policy, player) == pytest.approx(max(gains), abs=1e-9)


@pytest.mark.slow
def test_perfect_play_draws_at_tic_tac_toe() -> None:
    known: dict[TicTacToe, float] = {}

    def value(state: TicTacToe) -> float:
        if state.actor is None:
            return state.payoff
        if state not in known:
            values = [value(state.after(action)) for action in state.actions]
            known[state] = max(values) if state.actor == 0 else min(values)
        return known[state]

    def perfect(state: State) -> dict[str, float]:
        assert isinstance(state, TicTacToe)
        best = [action for action in state.actions if value(state.after(action)) == value(state)]
        return dict.fromkeys(best, 1 / len(best))

    assert value(TicTacToe()) == 0.0
    assert exploitability(TicTacToe(), perfect) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("state", [Kuhn(), TicTacToe()])
def test_every_random_game_ends_and_is_zero_sum(state: State) -> None:
    draw = random.Random(0)
    for _ in range(200):
        game = state
        while game.actor is not None:
            game = draw.choice(game.chances())[1] if game.actor == CHANCE else game.after(draw.choice(game.actions))
        assert abs(game.payoff) in ((1.0, 2.0) if isinstance(game, Kuhn) else (0.0, 1.0))


def test_the_environment_deals_by_seed_and_pays_by_the_rules() -> None:
    deals = set()
    for seed in range(60):
        game = KuhnPoker()
        assert game.reset(seed) == KuhnPoker().reset(seed)
        deals.add(game.state.cards)
        observations, rewards, ended = game.step({"first": "p"})
        assert (rewards, ended) == ({}, False) and observations["second"].text.endswith("moves p")
        assert game.step({"second": "b"})[0]["first"] == Observation(text=f"card {game.state.cards[0]} moves pb", actions=("p", "b"))
        assert game.step({"first": "p"}) == ({}, {"first": -1.0, "second": 1.0}, True)
    assert len(deals) == 6


def test_only_free_cells_are_allowed() -> None:
    game = TicTacToeGame()
    game.reset(0)
    observations, _, _ = game.step({"first": "5"})
    assert observations["second"].actions == ("1", "2", "3", "4", "6", "7", "8", "9")
    assert observations["second"].text == "you are o board ... / .x. / ..."
