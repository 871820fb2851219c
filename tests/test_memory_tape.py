"""The tape's rules on programs small enough to work out by hand."""

from course_lib.memory.blocks import Numerics, block, head
from course_lib.memory.tape import Tape, Tensor, plus


def top(moments, symbol="n"):
    return [moment.get(symbol, 0) for moment in moments]


def chain():
    """x -> a (saves x) -> b (saves its own output) -> c (saves nothing); one unit each."""
    tape, x = Tape(), Tensor("x", {"n": 1})
    a = tape.op("a", [x], {"n": 1}, saved=[x])
    b = tape.op("b", [a], {"n": 1}, saves_out=True)
    tape.op("c", [b], {"n": 1})
    return tape, x


def test_saved_counts_each_storage_once():
    tape, x = chain()
    tape.op("again", [tape.ops[-1].out], {"n": 1}, saved=[x])
    assert tape.saved() == {"n": 2}


def test_forward_keeps_what_is_saved_and_frees_what_is_not():
    tape, x = chain()
    assert top(tape.forward_sizes(x)) == [2, 3, 3]  # x a; x a b; x b c: `a` is gone after its last use
    assert top(tape.forward_sizes(x, keep=False)) == [2, 2, 2]


def test_backward_holds_saved_tensors_and_gradients_in_flight():
    tape, _ = chain()
    # saved x and b; gradients of c and b, then (b's saved output still there) of b and a, then of a and x
    assert top(tape.backward_sizes()) == [4, 4, 3]


def test_a_weight_gradient_stays_unless_it_is_added_to_an_older_one():
    tape, x = Tape(), Tensor("x", {"n": 1})
    y = tape.op("linear", [x], {"n": 1}, saved=[x], weight_grad={"w": 1})
    tape.op("linear 2", [y], {"n": 1}, saved=[y], weight_grad={"w": 1})
    assert top(tape.backward_sizes(), "w") == [1, 2]
    assert top(tape.backward_sizes(accumulate=True), "w") == [1, 1]


def test_an_addition_hands_its_gradient_on_and_a_cast_makes_a_new_one():
    tape, x = Tape(), Tensor("x", {"n": 4})
    small = tape.op("cast", [x], {"n": 2})
    tape.op("add", [x, small], {"n": 4}, passes_through=True)
    # the addition: its gradient (4), handed on to x, and cast (2) for the small branch; then the cast's gradient (4)
    assert top(tape.backward_sizes()) == [6, 10]


def test_nothing_is_saved_where_no_gradient_comes_by():
    tape, x = Tape(), Tensor("x", {"n": 1}, wants_grad=False)
    tape.op("a", [x], {"n": 1}, saved=[x])
    assert tape.saved() == {}


def test_a_name_that_is_still_held_counts():
    tape, x = chain()
    tape.ops[2].holds = [tape.ops[0].out]
    assert top(tape.forward_sizes(x)) == [2, 3, 4]


def test_block_in_fp32_is_the_table_of_lesson_1():
    tape, _ = block(Numerics())
    assert tape.saved() == {"Nh": 24, "N": 8, "Na": 8, "Nk": 8, "NH": 4, "Nm": 16}


def test_loss_takes_twelve_bytes_a_logit_at_its_worst():
    tape, _ = head(Numerics(compute=2, stored=2))
    assert max(top(tape.backward_sizes(), "NV")) == 12
    assert plus({"NV": 1}, {"NV": 2, "N": 3}) == {"NV": 3, "N": 3}
