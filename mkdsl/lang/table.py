"""The published table: the primitives of task bodies, and what to use for others.

docs/primitives.md is this table as text; tests/lang/test_table.py compares the two, and
tests/lower/emit/test_constructs.py runs a sample of every entry. What an entry may be
applied to is for roles.py to say.
"""

ELEMENTWISE = frozenset(
    """add sub mul div max min rem exp exp2 log log2 log1p expm1 tanh rsqrt sqrt square
    neg abs sign sin cos and or xor not eq ne lt le gt ge select_n integer_pow pow round
    floor ceil clamp logistic erf erfc convert_element_type is_finite copy stop_gradient
    """.split()
)
RENAMES = frozenset(("broadcast_in_dim", "reshape", "squeeze"))
REDUCTIONS = frozenset(("reduce_sum", "reduce_max", "reduce_min", "argmax"))
OTHERS = frozenset(
    """iota slice split concatenate transpose mk_roll mk_dot mk_fold mk_extent
    mk_program_id
    """.split()
)
PRIMITIVES = ELEMENTWISE | RENAMES | REDUCTIONS | OTHERS
REMEDY = {
    "dot_general": "use mk.dot(x, w): x [columns, depth], w [rows, depth]",
    "conv_general_dilated": "use mk.dot over blocks that index maps select",
    "gather": "let an index map of the spec select the block",
    "scatter": "write with out_specs or mk.Into",
    "dynamic_slice": "let an index map of the spec select the block",
    "dynamic_update_slice": "write with out_specs or mk.Into",
    "sort": "mk tasks have argmax; top-k as repeated argmax and jnp.where",
    "top_k": "repeat argmax and jnp.where",
    "cumsum": "use mk.fold over blocks",
    "scan": "use mk.fold over a streamed operand",
    "while": "use mk.fold over a streamed operand",
    "cond": "use jnp.where, or two calls behind a plan-time branch",
    "transpose": "only a streamed operand or a block of a fold can be transposed",
    "pad": "ragged edges are handled by specs",
    "rev": "use mk.roll",
    "random_seed": "pass random numbers as an operand",
    "random_bits": "pass random numbers as an operand",
    "cumprod": "use mk.fold over blocks",
    "cummax": "use mk.fold over blocks",
    "argmin": "use jnp.argmax(-x)",
    "reduce_or": "use jnp.max of the mask as int32",
    "reduce_and": "use jnp.min of the mask as int32",
    "reduce_prod": "use jnp.exp(jnp.sum(jnp.log(x)))",
    "reduce_precision": "cast with astype",
    "tan": "use jnp.sin(x) / jnp.cos(x)",
    "sinh": "use jnp.exp(x) and jnp.exp(-x)",
    "cosh": "use jnp.exp(x) and jnp.exp(-x)",
    "cbrt": "use jnp.exp2(jnp.log2(x) / 3)",
    "shift_left": "multiply by a power of two",
    "shift_right_arithmetic": "use // with a power of two",
}

# Features that a roll or a concatenation makes at once: the value is in registers.
MAX_SHORT = 256
SLICES = (
    "slices take all columns and multiples of 64 features; mk.roll rotates features "
    "by any number"
)
