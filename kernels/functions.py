"""Exponential, hyperbolic tangent and logistic function of vectors, without a library.

The bits are the same on every machine that has FMA.

exp(x) = 2^n exp(r) with x = n ln 2 + r, |r| <= ln(2)/2, and Taylor's series for exp(r) - 1, so far that what is left
out is below half a unit in the last place. Errors stay below two units in the last place.
"""

from __future__ import annotations

from math import factorial

from llvmlite import ir

LOG2E = 1.4426950408889634
LN2_HIGH = {4: 0.693359375, 8: 0.6931471803691238}
LN2_LOW = {4: -2.12194440054690583e-4, 8: 1.9082149292705877e-10}
"""ln 2 in two parts; products of the first with n are exact (W. Cody, W. Waite, Software manual for the elementary
functions, 1980; as in Cephes' expf and fdlibm's e_exp.c)."""

DEGREE = {4: 7, 8: 13}
"""r^8/8! < 2^-27 and r^14/14! < 2^-57 for |r| <= ln(2)/2."""

MANTISSA = {4: 23, 8: 52}
BIAS = {4: 127, 8: 1023}
LEAST = {4: -87.0, 8: -708.0}
"""Below this, exp(x) would be subnormal: the result is that of this argument."""


def exp(lanes, x):
    """e^x for x <= 0; NaN for NaN."""
    scale, rest = _parts(lanes, x)
    return lanes.fma(scale, rest, scale)


def tanh(lanes, x):
    """-m / (2 + m) with m = e^(-2|x|) - 1, and the sign of x: exact to the last places near zero too."""
    builder = lanes.builder
    negative = builder.fcmp_ordered("<", x, lanes.constant(0))
    size = builder.select(negative, x, builder.fneg(x))
    scale, rest = _parts(lanes, builder.fadd(size, size))
    less = lanes.fma(scale, rest, builder.fsub(scale, lanes.constant(1)))
    value = builder.fdiv(builder.fsub(lanes.constant(0), less), builder.fadd(lanes.constant(2), less))
    return builder.select(negative, builder.fneg(value), value)


def logistic(lanes, x):
    """1 / (1 + m) for x >= 0 and m / (1 + m) else, with m = e^-|x|: no overflow, and exact to the last places."""
    builder = lanes.builder
    negative = builder.fcmp_ordered("<", x, lanes.constant(0))
    power = exp(lanes, builder.select(negative, x, builder.fneg(x)))
    return builder.fdiv(builder.select(negative, power, lanes.constant(1)), builder.fadd(lanes.constant(1), power))


def _parts(lanes, x):
    """2^n and e^r - 1."""
    builder, size = lanes.builder, lanes.size
    low = lanes.constant(LEAST[size])
    # NaN compares false and goes through.
    x = builder.select(builder.fcmp_ordered("<", x, low), low, x)
    # Added to a number whose last place is 1, x log2(e) is rounded and n stands in the last bits.
    magic = lanes.constant(1.5 * 2.0 ** MANTISSA[size])
    shifted = lanes.fma(x, lanes.constant(LOG2E), magic)
    n = builder.fsub(shifted, magic)
    r = lanes.fma(n, lanes.constant(-LN2_HIGH[size]), x)
    r = lanes.fma(n, lanes.constant(-LN2_LOW[size]), r)
    series = lanes.constant(1 / factorial(DEGREE[size]))
    for degree in range(DEGREE[size] - 1, 0, -1):
        series = lanes.fma(series, r, lanes.constant(1 / factorial(degree)))
    return _power_of_two(lanes, shifted), builder.fmul(series, r)


def _power_of_two(lanes, shifted):
    """2^n from the last bits of `shifted`."""
    builder, size = lanes.builder, lanes.size
    integers = ir.VectorType(ir.IntType(8 * size), lanes.count)
    bias, places = (ir.Constant(integers, [number[size]] * lanes.count) for number in (BIAS, MANTISSA))
    bits = builder.add(builder.bitcast(shifted, integers), bias)
    return builder.bitcast(builder.shl(bits, places), lanes.vector)
