//! Grouped convolutions: one convolution per group, and a separate loop for groups of one channel.

use std::ops::Range;

use candle_core::{Result, Shape, Tensor, bail};

use super::dispatch;
use super::{ConvOptions, inside};
use crate::cpu::real::Real;
use crate::cpu::simd::{self, Kernel as Loop};
use crate::cpu::sums::{dot_centered, sum};
use crate::linear::weighted::{Gradients, Kernel};
use crate::sizes::{Geometry, Grouped};

impl Kernel for Grouped {
    type Options = ConvOptions;
    const NAME: &'static str = "conv2d";

    fn new(x: &Shape, weight: &Shape, options: ConvOptions) -> Result<Self> {
        let groups = options.groups;
        let (images, channels, height, width) = x.dims4()?;
        let (outputs, each, kernel_height, kernel_width) = weight.dims4()?;
        if groups == 0 || channels % groups != 0 || outputs % groups != 0 {
            bail!(
                "conv2d: {groups} groups do not divide the channels of an input {x:?} or the outputs of a weight \
                 {weight:?}"
            );
        }
        let x = Shape::from((images, channels / groups, height, width));
        let weight = Shape::from((outputs / groups, each, kernel_height, kernel_width));
        Ok(Self { one: Geometry::new(&x, &weight, options)?, groups })
    }

    fn outputs(&self) -> usize {
        self.groups * self.one.out_channels
    }

    fn output_shape(&self, _x: &Shape) -> Shape {
        (self.one.images, self.outputs(), self.one.out_height, self.one.out_width).into()
    }

    fn forward<T: Real>(&self, x: &[T], weight: &[T], bias: Option<&[T]>) -> Vec<T> {
        let mut y = vec![T::ZERO; self.one.images * self.outputs() * self.one.pixels()];
        if self.one.channels == 1 {
            simd::run(Depthwise { of: self, x, weight, bias, y: &mut y });
            return y;
        }
        for (group, weight) in weight.chunks_exact(self.weights()).enumerate() {
            let bias =
                bias.map(|bias| &bias[group * self.one.out_channels..][..self.one.out_channels]);
            let part = self.one.forward(&self.take(x, self.one.image(), group), weight, bias);
            self.put(&part, self.result(), group, &mut y);
        }
        y
    }

    fn on_device(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        dispatch::conv2d_grouped(x, weight, bias, self)
    }

    fn backward<T: Real>(&self, x: &[T], weight: &[T], dy: &[T], wants_x: bool) -> Gradients<T> {
        let mut dx = wants_x.then(|| vec![T::ZERO; x.len()]);
        let mut dw = vec![T::ZERO; weight.len()];
        let mut db = vec![T::ZERO; self.outputs()];
        if self.one.channels == 1 {
            let (to, dw_to, db_to) = (dx.as_deref_mut(), &mut dw[..], &mut db[..]);
            simd::run(DepthwiseBackward { of: self, x, weight, dy, dx: to, dw: dw_to, db: db_to });
            return Gradients { x: dx, weight: dw, bias: db };
        }
        for (group, weight) in weight.chunks_exact(self.weights()).enumerate() {
            let (x, dy) =
                (self.take(x, self.one.image(), group), self.take(dy, self.result(), group));
            let part = self.one.backward(&x, weight, &dy, wants_x);
            dw[group * self.weights()..][..self.weights()].copy_from_slice(&part.weight);
            db[group * self.one.out_channels..][..self.one.out_channels]
                .copy_from_slice(&part.bias);
            if let (Some(dx), Some(part)) = (&mut dx, &part.x) {
                self.put(part, self.one.image(), group, dx);
            }
        }
        Gradients { x: dx, weight: dw, bias: db }
    }
}

impl Grouped {
    /// Number of weights of a group.
    fn weights(&self) -> usize {
        self.one.out_channels * self.one.depth()
    }

    /// Number of elements in a group's result for one image.
    fn result(&self) -> usize {
        self.one.out_channels * self.one.pixels()
    }

    /// Copies one group's channels of all images, with `len` elements each.
    fn take<T: Real>(&self, images: &[T], len: usize, group: usize) -> Vec<T> {
        images.chunks_exact(len).skip(group).step_by(self.groups).flatten().copied().collect()
    }

    /// Writes the channels of [`take`](Self::take) back.
    fn put<T: Real>(&self, part: &[T], len: usize, group: usize, images: &mut [T]) {
        let own = images.chunks_exact_mut(len).skip(group).step_by(self.groups);
        own.zip(part.chunks_exact(len)).for_each(|(to, from)| to.copy_from_slice(from));
    }

    /// The gradient of the input, given that of the result.
    pub(crate) fn input_gradient<T: Real>(&self, weight: &[T], dy: &[T]) -> Vec<T> {
        let mut dx = vec![T::ZERO; self.one.images * self.groups * self.one.image()];
        for (group, weight) in weight.chunks_exact(self.weights()).enumerate() {
            let part = self.one.input_gradient(weight, &self.take(dy, self.result(), group));
            self.put(&part, self.one.image(), group, &mut dx);
        }
        dx
    }

    /// The taps of a kernel that overlap the image: index, output lines and columns, first line and
    /// column of the input.
    #[inline(always)]
    fn taps(&self) -> impl Iterator<Item = Tap> {
        let g = self.one;
        (0..g.kernel_height * g.kernel_width).map(move |tap| {
            let (y, x) = (tap / g.kernel_width * g.dilation, tap % g.kernel_width * g.dilation);
            let (ys, y0) = inside(y, g.height, g.out_height, g.window);
            let (xs, x0) = inside(x, g.width, g.out_width, g.window);
            Tap { ys, y0, xs, x0 }
        })
    }
}

/// The input positions read by a tap of a kernel.
struct Tap {
    /// Output lines and columns.
    ys: Range<usize>,
    xs: Range<usize>,
    /// First line and column of the input.
    y0: usize,
    x0: usize,
}

impl Tap {
    /// The input line for an output line, from the first column on.
    #[inline(always)]
    fn line(&self, g: &Geometry, y: usize) -> Range<usize> {
        let row = self.y0 + (y - self.ys.start) * g.window.stride;
        row * g.width + self.x0..(row + 1) * g.width
    }
}

/// Forward pass of groups of one channel.
struct Depthwise<'a, T> {
    of: &'a Grouped,
    x: &'a [T],
    weight: &'a [T],
    bias: Option<&'a [T]>,
    y: &'a mut [T],
}

impl<T: Real> Loop for Depthwise<'_, T> {
    #[inline(always)]
    fn run(self) {
        let (g, outputs) = (&self.of.one, self.of.outputs());
        let taps: Vec<Tap> = self.of.taps().collect();
        for (at, y) in self.y.chunks_exact_mut(g.pixels()).enumerate() {
            let (image, output) = (at / outputs, at % outputs);
            let plane = image * self.of.groups + output / g.out_channels;
            let x = &self.x[plane * g.image()..][..g.image()];
            y.fill(self.bias.map_or(T::ZERO, |bias| bias[output]));
            for (tap, weight) in taps.iter().zip(&self.weight[output * taps.len()..]) {
                for row in tap.ys.clone() {
                    let y = &mut y[row * g.out_width..][..g.out_width][tap.xs.clone()];
                    let x = &x[tap.line(g, row)];
                    if g.window.stride == 1 {
                        y.iter_mut().zip(x).for_each(|(y, x)| *y += *weight * *x);
                    } else {
                        let x = x.iter().step_by(g.window.stride);
                        y.iter_mut().zip(x).for_each(|(y, x)| *y += *weight * *x);
                    }
                }
            }
        }
    }
}

/// Backward pass of groups of one channel.
struct DepthwiseBackward<'a, T> {
    of: &'a Grouped,
    x: &'a [T],
    weight: &'a [T],
    dy: &'a [T],
    dx: Option<&'a mut [T]>,
    dw: &'a mut [T],
    db: &'a mut [T],
}

impl<T: Real> Loop for DepthwiseBackward<'_, T> {
    #[inline(always)]
    fn run(mut self) {
        let (g, outputs) = (&self.of.one, self.of.outputs());
        let taps: Vec<Tap> = self.of.taps().collect();
        for (at, dy) in self.dy.chunks_exact(g.pixels()).enumerate() {
            let (image, output) = (at / outputs, at % outputs);
            let plane = image * self.of.groups + output / g.out_channels;
            let plane = plane * g.image()..(plane + 1) * g.image();
            self.db[output] += sum(dy);
            for (i, tap) in taps.iter().enumerate() {
                let weight = output * taps.len() + i;
                for row in tap.ys.clone() {
                    let dy = &dy[row * g.out_width..][..g.out_width][tap.xs.clone()];
                    let x = &self.x[plane.clone()][tap.line(g, row)];
                    self.dw[weight] += if g.window.stride == 1 {
                        dot_centered(dy, &x[..dy.len()], T::ZERO)
                    } else {
                        let x = x.iter().step_by(g.window.stride);
                        dy.iter().zip(x).map(|(dy, x)| *dy * *x).sum()
                    };
                    let Some(dx) = self.dx.as_deref_mut() else { continue };
                    let (weight, dx) =
                        (self.weight[weight], &mut dx[plane.clone()][tap.line(g, row)]);
                    if g.window.stride == 1 {
                        dx.iter_mut().zip(dy).for_each(|(dx, dy)| *dx += weight * *dy);
                    } else {
                        let dx = dx.iter_mut().step_by(g.window.stride);
                        dx.zip(dy).for_each(|(dx, dy)| *dx += weight * *dy);
                    }
                }
            }
        }
    }
}
