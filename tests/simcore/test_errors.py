"""Errors say where, what was found and what is allowed, and survive the way between processes."""

import copy
import pickle

import pytest

from simcore.errors import BadInput, ConfigError, PolicyError, SimcoreError, TraceError


@pytest.mark.parametrize("kind", [BadInput, ConfigError, TraceError])
def test_the_parts_of_the_message_and_the_round_trip(kind):
    error = kind("study.yaml", "cluster.replicas", found=0, allowed="at least 1", why="nobody would serve")
    assert str(error) == "study.yaml: cluster.replicas: nobody would serve: found 0: allowed: at least 1"
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is kind
        assert (str(twin), vars(twin)) == (str(error), vars(error))
    assert isinstance(error, SimcoreError)
    assert str(kind("a.csv")) == "a.csv"


def test_what_was_found_is_cut_when_it_is_long():
    message = str(BadInput("x", found="y" * 1000))
    assert len(message) < 150
    assert message.endswith("...")


def test_a_policy_error_names_the_policy_even_where_its_class_is_unknown():
    class Hold:
        pass

    error = PolicyError(Hold(), 2.0, "an expert on both sides")
    assert str(error) == "policy Hold at t=2.000000 s: an expert on both sides"
    twin = pickle.loads(pickle.dumps(error))
    assert (str(twin), twin.time, twin.decision) == (str(error), 2.0, "an expert on both sides")
