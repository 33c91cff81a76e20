"""Equality of answers: the public bug reports, the conventions, and golds that cannot be compared with."""

import pytest

from qerl.tasks.verify import check_gold, verify

# gold => answer
EQUAL = r"""
# plain numbers
18 => 18.0
18 => 18.
073 => 73
025 => 25
1200 => $1,200
1200 => \$1{,}200.00
-3 => - 3
0.4 => .4
1,000,000 => 1000000
1.5e3 => 1500
999999999999999 => 999999999999999.0
# fractions
\frac{1}{2} => 1/2
\frac12 => 0.5
\frac{-3}{4} => -\frac34
1\frac12 => 3/2
6 1/64 => 385/64
\frac{1}{2^{99}} => 2^{-99}
0.1+0.2 => 0.3
# undelimited gold
(3,\frac{\pi}{2}) => \left(3, \frac{\pi}{2}\right)
\text{Evelyn} => Evelyn
\text{Evelyn} => \boxed{\text{Evelyn}}
p - q => -q+p
\frac{14}{3} => $\frac{14}{3}$
# formulas
\sqrt{8} => 2\sqrt2
n^2+n => n(n+1)
\tan^2(y)+1 => \sec^2 y
5\sqrt[3]{4} => 5\cdot2^{2/3}
\log_2 8 => 3
\frac{\log 2}{\log 3} => \log_3 2
2+3i => 3i+2
\binom{n+1}{2} => \frac{n(n+1)}{2}
2\arcsin\sqrt a => \arccos(1-2a)
10! => 3628800
\lceil n/2\rceil+1 => 1+\lceil\frac{n}{2}\rceil
# percent, degrees, units, money
50% => 0.5
0.5 => 50\%
50 => 50%
62.5% => \dfrac58
28 => 28 percent
336 => 336^\circ
\frac{\pi}{6} => 30^\circ
\sin 30^\circ => 1/2
60^\circ 42' => 60.7^\circ
5 cm => 5
5 => 5 apples
15\mbox{ cm}^2 => 15
12 => 12^{\mathrm{th}}
\$10 => 10
15th Day => 15
0.06\text{ yuan} => 0.06
5 km => 5\text{ kilometers}
# lists, sets, tuples
1,2 => 2,1
1,2,3 => \{3,2,1\}
\{1,1,2\} => \{1,2\}
(1,2) => 1,2
7,4 => 7\text{ goats and }4\text{ cows}
3\pm2\sqrt2 => 3+2\sqrt2, 3-2\sqrt2
\pm 5 => -5, 5
(2,1),(1,2) => (1,2)\text{ and }(2,1)
2400, 1350, 864 => 864, 1,350, 2,400
②③ => 2, 3
(k, 3-k) => (t, 3-t)
# names
11 => x = 11
(p,q)=(3,2) => (3,2)
f(x)=2x+3 => y=2x+3
f(z)=z => f(x)=x
-3,0 => b=-3, c=0
1,3 => Minimum: 1, Maximum: 3
|AB|=1 => 1
x=5+6=11 => 11
f(n)=n, g(n)=1 => (f(n),g(n))=(n,1)
x=y=z=\frac{1}{2} => 1/2
4 => \sqrt{16} = 4
# intervals and inequalities
(-\infty,2)\cup(3,\infty) => x<2\text{ or }x>3
-4<m\leq0 => (-4,0]
(-4,0] => m\in(-4,0]
x<=1 => -x>=-1
\{x\mid 2<x<3\} => (2,3)
5<=x => x>=5
a\neq2 => (-\infty,2)\cup(2,\infty)
\mathbb{R} => (-\infty,\infty)
\{x|x<\frac32\}-\{-6\} => (-\infty,-6)\cup(-6,1.5)
\emptyset => \{\}
# matrices, ratios, bases, times
\begin{pmatrix}1\\2\end{pmatrix} => \begin{bmatrix} 1 \\ 2 \end{bmatrix}
\begin{pmatrix}1\\2\end{pmatrix} => (1,2)
\left[\begin{array}{cc}1&2\\3&4\end{array}\right] => \begin{pmatrix}1&2\\3&4\end{pmatrix}
\begin{pmatrix}1\\3\end{pmatrix} => \begin{pmatrix}0\\1\end{pmatrix}+\begin{pmatrix}1\\2\end{pmatrix}
3:4 => 6:8
3:4 => 3/4
204_5 => 204_{5}
12:30 => 12:30
# equations
x^2/4+y^2/3=1 => x^2/16+y^2/12=1/4
2x+3y=6 => y=2-\frac23x
xy=6 => \frac6x
34x+45y=7 => -34x-45y=-7
# rounded
4.123105625617661 => \sqrt{17}
0.458 => \frac{27}{59}
1/12 => 0.0833333333333333
\frac{\sqrt3}{2} => 0.8660254
# texts
A => (A)
A => \text{(A)}
yes => Yes.
\text{June 20} => june 20
The function is odd. => odd
# left to math-verify
\int_0^1 x\,dx => 1/2
\sum_{k=1}^{10} k => 55
"""
UNEQUAL = r"""
# absolute tolerance
1/2^99 => 1/2^98
10^{-20} => 0
10^{-20} => 2\cdot10^{-20}
0.30000000000000004 => 0.3
\frac{\pi}{2^{300}} => \frac{\pi}{2^{301}}
\sqrt2 => \sqrt2+10^{-50}
5 => 5.001
# dropped parts
1 - \frac{1}{\mathrm{e}} => 1 + \frac{1}{\mathrm{e}}
4 => 4\sqrt(2)
4 => 4x
4 => 4\pi
1 => 1\sqrt{19}
2 => 2i
3 => 3\log 5
7=11a+c => 11a+c
a+3z=0 => 0
x+2n+1 => x+1
# first characters
18 => 19
18 => 180
1 => 12
18 =>
18 => 1.8
# rounded too far
1/3 => 0.333
2/3 => 0.67
\pi => 3.14
\pi => 22/7
e^{\pi} => 23.14
6.67 => 20:7
0.5 => \frac{6}{11}
3 => \pi
# percent and units
0.5 => 0.5%
5 cm => 5 m
45^\circ => 60^\circ
41.4% => 28.5%
4\text{ hours and }8\text{ minutes} => 4\text{ hours and }9\text{ minutes}
# order and brackets
(1,2) => (2,1)
[1,2] => (1,2)
[-3,2] => (-3,2)
\{1,2,3\} => (3,2,1)
1,1,2 => 1,2,2
1,2,3 => 1,2
\pm2021 => 2021
(2,32), (8,18) => (2,32), (8,17)
(1,2),(3,4) => (1,2,3,4)
# names
x=5 => y=5
x=1, y=0 => x=8, y=0
x=1, y=0 => y=1, x=0
\sin(x)=\frac{42}{59} => \cos(x)=\frac{42}{59}
f(0)=0 => f(3)=0
# relations
x>5 => x<5
x>=5 => x>5
x>3 => y>3
f(2)<f(1) => f(1)<f(2)
a-3b>=0 => a-b>=0
x<1 => x>-1
y=2x+3 => y-2x+3=0
# functions of sign
\sqrt{x^2} => x
|x| => x
p-q => q-p
2+3i => 2-3i
\infty => -\infty
# matrices, ratios, bases, times
\begin{pmatrix}1\\2\end{pmatrix} => \begin{pmatrix}2\\1\end{pmatrix}
\begin{pmatrix}1&2\end{pmatrix} => \begin{pmatrix}1\\2\end{pmatrix}
3:4 => 4:3
204_5 => 204_6
12:00 => 1:00
# texts
A => B
yes => no
not odd => odd
The number is not odd. => odd
Evelyn => Evelyn or Ann
# undefined
0 => 1/0
5 => 1/0
9^{9^{9^9}} => 9^{9^{9^8}}
# left to math-verify
\int_0^1 x\,dx => 1/3
\sum_{k=1}^{10} k => 54
# qualifiers
f(x)=x\text{ for all }x\in[0,1] => f(x)=x\text{ for all }x\in[0,5]
"""


def pairs(table):
    lines = [line for line in table.strip().splitlines() if not line.startswith("# ")]
    return [pytest.param(*(part.strip() for part in line.split("=>", 1)), id=line) for line in lines]


@pytest.mark.parametrize(("gold", "answer"), pairs(EQUAL))
def test_equal(gold, answer):
    verdict = verify(gold, answer)
    assert verdict.equal, verdict.reason


@pytest.mark.parametrize(("gold", "answer"), pairs(UNEQUAL))
def test_unequal(gold, answer):
    verdict = verify(gold, answer)
    assert not verdict.equal, verdict.reason


@pytest.mark.parametrize("gold", ["", "  ", "???", "$ $", r"\boxed{}", r"\frac{1}{", r"\foo{3}", "word " * 13])
def test_golds_that_cannot_be_compared_with(gold):
    assert check_gold(gold)


@pytest.mark.parametrize(
    "gold", ["18", "Evelyn", r"\text{(A)}", r"\frac{1}{2}", r"\int_0^1 x\,dx", "x<3", r"40\text{ min}"]
)
def test_golds_that_can(gold):
    assert check_gold(gold) is None


JUNK = [
    "(" * 3000,
    r"\frac{" * 500,
    r"\sqrt{" * 900 + "2" + "}" * 900,
    "x^" * 700 + "2",
    "+".join("x" * 700),
    "9" * 20000 + "!",
    r"2^{2^{2^{2^{2^{2}}}}}",
    "|" * 2000,
    r"\begin{pmatrix}" * 100,
    "1," * 3000,
    r"\text{" * 300,
    "\x00\x0c\t",
    "$" * 999,
    "9^{9^{9^9}}",
    "-" * 3000 + "5",
    "((1,2),",
    r"\boxed{",
    "😀",
    "x!" * 300,
    "5" + "!" * 300,
]


@pytest.mark.parametrize("junk", JUNK, ids=range(len(JUNK)))
def test_junk_is_unequal_and_never_raises(junk):
    assert not verify("18", junk).equal
    assert not verify(r"x^2+\frac12", junk).equal
    check_gold(junk)


def test_an_answer_is_taken_as_it_is_when_extracted():
    assert verify("az^3 + bz^2 + cz + d", "az^3 + bz^2 + cz + d", extracted=True).equal
    assert verify("5", "so we get 5").equal
    assert not verify("5", "so we get 5", extracted=True).equal
