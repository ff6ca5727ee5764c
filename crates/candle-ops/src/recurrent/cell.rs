//! One step of one sample: the gates and the next state, and their gradients. Loops are short and
//! of few slices each, so that the compiler vectorizes them.

use crate::activation::scalar::{sigmoid_at, tanh_at};
use crate::cpu::real::Real;

/// A kind of recurrent cell. `GATES` rows of the weight belong to each hidden unit.
pub(crate) trait Cell: Copy + Send + Sync + 'static {
    const NAME: &'static str;
    const GATES: usize;
    /// Whether there is a cell state beside the hidden state.
    const HAS_CELL: bool;

    /// Computes the next state from the products with input and state.
    fn forward<T: Real>(step: Forward<'_, T>);

    /// Replaces the gradients of the next state by those of the state itself, without the part that
    /// the product hands on.
    fn backward<T: Real>(step: Backward<'_, T>);
}

/// Slices of one sample, whose lengths are multiples of the hidden size; `c` and `next_c` are
/// empty without a cell state.
pub(crate) struct Forward<'a, T> {
    pub(crate) x: &'a [T],
    pub(crate) product: &'a [T],
    pub(crate) bias: &'a [T],
    pub(crate) h: &'a [T],
    pub(crate) c: &'a [T],
    pub(crate) next_h: &'a mut [T],
    pub(crate) next_c: &'a mut [T],
    /// Four numbers per hidden unit for the backward pass.
    pub(crate) saved: &'a mut [T],
}

/// As [`Forward`].
pub(crate) struct Backward<'a, T> {
    pub(crate) saved: &'a [T],
    pub(crate) h: &'a [T],
    pub(crate) c: &'a [T],
    pub(crate) next_c: &'a [T],
    pub(crate) dh: &'a mut [T],
    pub(crate) dc: &'a mut [T],
    pub(crate) dx: &'a mut [T],
    pub(crate) dproduct: &'a mut [T],
}

/// Gates: input, forget, cell, output.
#[derive(Clone, Copy)]
pub(crate) struct Lstm;

impl Cell for Lstm {
    const NAME: &'static str = "lstm";
    const GATES: usize = 4;
    const HAS_CELL: bool = true;

    #[inline(always)]
    fn forward<T: Real>(step: Forward<'_, T>) {
        let Forward { x, product, bias, c, next_h, next_c, saved, .. } = step;
        for (((v, x), p), b) in saved.iter_mut().zip(x).zip(product).zip(bias) {
            *v = *x + *p + *b;
        }
        let [i, f, g, o] = quarters_mut(saved);
        for gate in [&mut *i, &mut *f, &mut *o] {
            for v in gate {
                *v = sigmoid_at(*v).0;
            }
        }
        for v in &mut *g {
            *v = tanh_at(*v).0;
        }
        for ((next, f), c) in next_c.iter_mut().zip(&*f).zip(c) {
            *next = *f * *c;
        }
        for ((next, i), g) in next_c.iter_mut().zip(&*i).zip(&*g) {
            *next += *i * *g;
        }
        for ((h, o), c) in next_h.iter_mut().zip(&*o).zip(&*next_c) {
            *h = *o * tanh_at(*c).0;
        }
    }

    #[inline(always)]
    fn backward<T: Real>(step: Backward<'_, T>) {
        let Backward { saved, c, next_c, dh, dc, dx, dproduct, .. } = step;
        let [i, f, g, o] = quarters(saved);
        let [di, df, dg, d_o] = quarters_mut(dproduct);
        for (((dh, dc), d_o), (o, c)) in
            dh.iter_mut().zip(&mut *dc).zip(d_o).zip(o.iter().zip(next_c))
        {
            let (tanh, slope) = tanh_at(*c);
            *d_o = *dh * tanh * *o * (T::ONE - *o);
            *dc += *dh * *o * slope;
            *dh = T::ZERO;
        }
        for ((di, dc), (i, g)) in di.iter_mut().zip(&*dc).zip(i.iter().zip(g)) {
            *di = *dc * *g * *i * (T::ONE - *i);
        }
        for ((dg, dc), (i, g)) in dg.iter_mut().zip(&*dc).zip(i.iter().zip(g)) {
            *dg = *dc * *i * (T::ONE - *g * *g);
        }
        for ((df, dc), (f, c)) in df.iter_mut().zip(dc).zip(f.iter().zip(c)) {
            *df = *dc * *c * *f * (T::ONE - *f);
            *dc *= *f;
        }
        dx.copy_from_slice(dproduct);
    }
}

/// Gates: reset, update, new. The bias of the recurrent product is within the reset gate.
#[derive(Clone, Copy)]
pub(crate) struct Gru;

impl Cell for Gru {
    const NAME: &'static str = "gru";
    const GATES: usize = 3;
    const HAS_CELL: bool = false;

    #[inline(always)]
    fn forward<T: Real>(step: Forward<'_, T>) {
        let Forward { x, product, bias, h, next_h, saved, .. } = step;
        let hidden = h.len();
        let [r, z, n, product_n] = quarters_mut(saved);
        for (gate, at) in [(&mut *r, 0), (&mut *z, hidden)] {
            let (x, p, b) = (&x[at..], &product[at..], &bias[at..]);
            for (((v, x), p), b) in gate.iter_mut().zip(x).zip(p).zip(b) {
                *v = sigmoid_at(*x + *p + *b).0;
            }
        }
        let at = 2 * hidden;
        for ((v, p), b) in product_n.iter_mut().zip(&product[at..]).zip(&bias[at..]) {
            *v = *p + *b;
        }
        for (((n, x), r), p) in n.iter_mut().zip(&x[at..]).zip(&*r).zip(&*product_n) {
            *n = tanh_at(*x + *r * *p).0;
        }
        for (((next, n), z), h) in next_h.iter_mut().zip(&*n).zip(&*z).zip(h) {
            *next = (T::ONE - *z) * *n + *z * *h;
        }
    }

    #[inline(always)]
    fn backward<T: Real>(step: Backward<'_, T>) {
        let Backward { saved, h, dh, dx, dproduct, .. } = step;
        let hidden = h.len();
        let [r, z, n, product_n] = quarters(saved);
        let (dr, rest) = dx.split_at_mut(hidden);
        let (dz, dn) = rest.split_at_mut(hidden);
        for (((dz, dh), z), (n, h)) in dz.iter_mut().zip(&*dh).zip(z).zip(n.iter().zip(h)) {
            *dz = *dh * (*h - *n) * *z * (T::ONE - *z);
        }
        for (((dn, dh), z), n) in dn.iter_mut().zip(dh).zip(z).zip(n) {
            *dn = *dh * (T::ONE - *z) * (T::ONE - *n * *n);
            *dh *= *z;
        }
        for (((dr, dn), r), p) in dr.iter_mut().zip(&*dn).zip(r).zip(product_n) {
            *dr = *dn * *p * *r * (T::ONE - *r);
        }
        let (gates, dproduct_n) = dproduct.split_at_mut(2 * hidden);
        gates.copy_from_slice(&dx[..2 * hidden]);
        for ((to, dn), r) in dproduct_n.iter_mut().zip(&dx[2 * hidden..]).zip(r) {
            *to = *dn * *r;
        }
    }
}

#[inline(always)]
fn quarters<T>(values: &[T]) -> [&[T]; 4] {
    let (left, right) = values.split_at(values.len() / 2);
    let ((a, b), (c, d)) = (left.split_at(left.len() / 2), right.split_at(right.len() / 2));
    [a, b, c, d]
}

#[inline(always)]
fn quarters_mut<T>(values: &mut [T]) -> [&mut [T]; 4] {
    let (left, right) = values.split_at_mut(values.len() / 2);
    let half = left.len() / 2;
    let ((a, b), (c, d)) = (left.split_at_mut(half), right.split_at_mut(half));
    [a, b, c, d]
}
