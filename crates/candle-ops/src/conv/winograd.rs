//! Convolution with 3 x 3 kernels of stride 1 by Winograd's F(2 x 2, 3 x 3), which needs fewer
//! multiplications.
//!
//! The output is divided into tiles of 2 x 2, each of which depends on 4 x 4 input pixels. With the
//! matrices `A`, `B` and `G` of Lavin and Gray (2015, section 4.1), a tile is
//! `A' [(G w G') * (B' x B)] A`, where the star is the element-wise product: 16 multiplications
//! instead of 36. Summed over channels, each of the 16 elements is a separate matrix product,
//! `[out_channels, channels]` by `[channels, tiles]`. The backward pass is the same chain in
//! reverse, with each step replaced by its transpose.
//!
//! The tiles of a plane are adjacent in memory, for each of the 4 columns that they read, so that
//! every transformation runs over contiguous values ([`Phases`]).
//!
//! Rounding errors are those of the direct sum and of the few additions of the transformations. A
//! NaN or infinity propagates to its whole tile, and so also to outputs up to one pixel away from
//! the windows that cover it.

use super::{Window, inside};
use crate::cpu::gemm::{Mat, gemm};
use crate::cpu::real::Real;
use crate::cpu::simd::{self, Kernel};
use crate::cpu::sums::sum;
use crate::linear::weighted::Gradients;

/// The sizes of one convolution with 3 x 3 kernels and stride 1.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Winograd {
    pub(crate) channels: usize,
    pub(crate) height: usize,
    pub(crate) width: usize,
    pub(crate) out_channels: usize,
    pub(crate) out_height: usize,
    pub(crate) out_width: usize,
    pub(crate) padding: usize,
    /// Number of images transformed at once.
    pub(crate) group: usize,
}

impl Winograd {
    /// Numbers of tiles in an image, vertically and horizontally.
    fn tiles(&self) -> (usize, usize) {
        (self.out_height.div_ceil(2), self.out_width.div_ceil(2))
    }

    /// Numbers of elements in an input image and in an output image.
    fn images(&self) -> (usize, usize) {
        let input = self.channels * self.height * self.width;
        (input, self.out_channels * self.out_height * self.out_width)
    }

    /// The result.
    pub(crate) fn forward<T: Real>(&self, x: &[T], weight: &[T], bias: Option<&[T]>) -> Vec<T> {
        let (input, output) = self.images();
        let (rows, cols) = self.tiles();
        let tiles = self.group * rows * cols;
        let u = self.weights(weight);
        let mut v = Sixteen::new(self.channels * tiles);
        let mut m = Sixteen::new(self.out_channels * tiles);
        let mut phases = Phases::new(self.height, self.width, rows, cols, self.padding);
        let mut quads = Quads::new(self.out_height, self.out_width);
        let mut y = vec![T::ZERO; x.len() / input.max(1) * output];
        for (x, y) in x.chunks(self.group * input).zip(y.chunks_mut(self.group * output)) {
            let tiles = x.len() / input * rows * cols;
            self.transform_input(x, &mut phases, &mut v);
            for at in 0..16 {
                let u = Mat::new(u.of(at), self.out_channels, self.channels);
                let v = Mat::new(&v.of(at)[..self.channels * tiles], self.channels, tiles);
                gemm(&mut m.of_mut(at)[..self.out_channels * tiles], false, u, v);
            }
            let plane = self.out_height * self.out_width;
            for (at, y) in y.chunks_exact_mut(plane).enumerate() {
                let (image, channel) = (at / self.out_channels, at % self.out_channels);
                let from = channel * tiles + image * rows * cols;
                simd::run(FromM { m: &m, from, quads: &mut quads });
                quads.write(y, bias.map_or(T::ZERO, |bias| bias[channel]));
            }
        }
        y
    }

    /// The gradients, given that of the result.
    pub(crate) fn backward<T: Real>(
        &self,
        x: &[T],
        weight: &[T],
        dy: &[T],
        wants_x: bool,
    ) -> Gradients<T> {
        let (input, output) = self.images();
        let (rows, cols) = self.tiles();
        let tiles = self.group * rows * cols;
        let u = self.weights(weight);
        let mut du = Sixteen::new(self.out_channels * self.channels);
        let mut v = Sixteen::new(self.channels * tiles);
        let mut m = Sixteen::new(self.out_channels * tiles);
        let mut phases = Phases::new(self.height, self.width, rows, cols, self.padding);
        let mut dphases = Phases::new(self.height, self.width, rows, cols, self.padding);
        let mut db = vec![T::ZERO; self.out_channels];
        let mut dx = if wants_x { vec![T::ZERO; x.len()] } else { Vec::new() };
        for (at, dy) in dy.chunks(self.group * output).enumerate() {
            let images = dy.len() / output;
            let tiles = images * rows * cols;
            let x = &x[at * self.group * input..][..images * input];
            self.transform_input(x, &mut phases, &mut v);
            self.transform_gradient(dy, &mut m, &mut db);
            for at in 0..16 {
                let dm = Mat::new(&m.of(at)[..self.out_channels * tiles], self.out_channels, tiles);
                let own = &mut v.of_mut(at)[..self.channels * tiles];
                let size = self.out_channels * self.channels;
                gemm(&mut du.of_mut(at)[..size], true, dm, Mat::new(own, self.channels, tiles).t());
                if wants_x {
                    let u = Mat::new(u.of(at), self.out_channels, self.channels);
                    gemm(own, false, u.t(), dm);
                }
            }
            if wants_x {
                let dx = &mut dx[at * self.group * input..][..images * input];
                for (at, dx) in dx.chunks_exact_mut(self.height * self.width).enumerate() {
                    let (image, channel) = (at / self.channels, at % self.channels);
                    let from = channel * tiles + image * rows * cols;
                    dphases.clear();
                    simd::run(FromV { v: &v, from, phases: &mut dphases });
                    dphases.add_to(dx);
                }
            }
        }
        Gradients { x: wants_x.then_some(dx), weight: self.weight_gradient(&du), bias: db }
    }

    /// `G w G'` of every kernel.
    fn weights<T: Real>(&self, weight: &[T]) -> Sixteen<T> {
        let mut u = Sixteen::exact(self.out_channels * self.channels);
        for (at, w) in weight.as_chunks::<9>().0.iter().enumerate() {
            let half: [[T; 4]; 3] =
                std::array::from_fn(|col| widen([w[col], w[3 + col], w[6 + col]]));
            let [a, b, c] = half;
            for (row, ((a, b), c)) in a.into_iter().zip(b).zip(c).enumerate() {
                for (col, value) in widen([a, b, c]).into_iter().enumerate() {
                    u.of_mut(row * 4 + col)[at] = value;
                }
            }
        }
        u
    }

    /// `G' du G` of every kernel.
    fn weight_gradient<T: Real>(&self, du: &Sixteen<T>) -> Vec<T> {
        let mut dw = vec![T::ZERO; self.out_channels * self.channels * 9];
        for (at, dw) in dw.as_chunks_mut::<9>().0.iter_mut().enumerate() {
            let half: [[T; 3]; 4] = std::array::from_fn(|col| {
                narrow(std::array::from_fn(|row| du.of(row * 4 + col)[at]))
            });
            for row in 0..3 {
                let values = narrow(std::array::from_fn(|col| half[col][row]));
                dw[row * 3..row * 3 + 3].copy_from_slice(&values);
            }
        }
        dw
    }

    /// `B' x B` for every tile of some images.
    fn transform_input<T: Real>(&self, x: &[T], phases: &mut Phases<T>, v: &mut Sixteen<T>) {
        let plane = self.height * self.width;
        let (rows, cols) = self.tiles();
        let images = x.len() / (self.channels * plane);
        for channel in 0..self.channels {
            for image in 0..images {
                phases.read(&x[(image * self.channels + channel) * plane..][..plane]);
                let to = (channel * images + image) * rows * cols;
                simd::run(ToV { phases, v, to });
            }
        }
    }

    /// `A dy A'` for every tile of some images; the sums of each channel are added to `db`.
    fn transform_gradient<T: Real>(&self, dy: &[T], m: &mut Sixteen<T>, db: &mut [T]) {
        let plane = self.out_height * self.out_width;
        let (rows, cols) = self.tiles();
        let images = dy.len() / (self.out_channels * plane);
        let mut quads = Quads::new(self.out_height, self.out_width);
        for (channel, db) in db.iter_mut().enumerate() {
            for image in 0..images {
                let dy = &dy[(image * self.out_channels + channel) * plane..][..plane];
                *db += sum(dy);
                quads.read(dy);
                let to = (channel * images + image) * rows * cols;
                simd::run(ToM { quads: &quads, m, to });
            }
        }
    }
}

/// Sixteen matrices of the same size, each with padding for the rest of a vector.
struct Sixteen<T> {
    data: Vec<T>,
    pitch: usize,
}

impl<T: Real> Sixteen<T> {
    fn new(size: usize) -> Self {
        Self::exact(size + LANES)
    }

    fn exact(size: usize) -> Self {
        Self { data: vec![T::ZERO; 16 * size], pitch: size }
    }

    #[inline(always)]
    fn of(&self, at: usize) -> &[T] {
        &self.data[at * self.pitch..][..self.pitch]
    }

    #[inline(always)]
    fn of_mut(&mut self, at: usize) -> &mut [T] {
        &mut self.data[at * self.pitch..][..self.pitch]
    }
}

/// A plane of the input, arranged by tiles: one plane for each parity of the row and each of the 4
/// columns of a tile, in which the values of neighbouring tiles are adjacent.
struct Phases<T> {
    planes: [Vec<T>; 8],
    height: usize,
    width: usize,
    rows: usize,
    cols: usize,
    padding: usize,
}

impl<T: Real> Phases<T> {
    fn new(height: usize, width: usize, rows: usize, cols: usize, padding: usize) -> Self {
        let plane = || vec![T::ZERO; (rows + 1) * cols + LANES];
        let planes = std::array::from_fn(|_| plane());
        Self { planes, height, width, rows, cols, padding }
    }

    fn clear(&mut self) {
        self.planes.iter_mut().for_each(|plane| plane.fill(T::ZERO));
    }

    /// For each plane, its lines inside the image: their range in the plane, the pixel of the first
    /// value, and the distance between the pixels of successive lines.
    fn lines(&self, at: usize) -> impl Iterator<Item = (std::ops::Range<usize>, usize)> + use<T> {
        let halves = Window { stride: 2, padding: self.padding };
        let (ys, y0) = inside(at / 4, self.height, self.rows + 1, halves);
        let (xs, x0) = inside(at % 4, self.width, self.cols, halves);
        let (cols, width) = (self.cols, self.width);
        ys.enumerate().map(move |(line, y)| {
            (y * cols + xs.start..y * cols + xs.end, (y0 + 2 * line) * width + x0)
        })
    }

    /// Splits a plane. Values outside of the image are never written, and stay 0.
    fn read(&mut self, plane: &[T]) {
        for at in 0..8 {
            for (line, from) in self.lines(at) {
                let to = &mut self.planes[at][line];
                to.iter_mut().zip(plane[from..].iter().step_by(2)).for_each(|(to, v)| *to = *v);
            }
        }
    }

    /// Adds the values of each tile to their pixels.
    fn add_to(&self, plane: &mut [T]) {
        for at in 0..8 {
            for (line, to) in self.lines(at) {
                let from = &self.planes[at][line];
                plane[to..].iter_mut().step_by(2).zip(from).for_each(|(to, v)| *to += *v);
            }
        }
    }

    /// The plane and the offset of the values of row `row` and column `col` of the tiles.
    #[inline(always)]
    fn at(&self, row: usize, col: usize) -> (usize, usize) {
        (row % 2 * 4 + col, row / 2 * self.cols)
    }
}

/// A plane of the output, with a separate plane for each of a tile's 2 x 2 pixels.
struct Quads<T> {
    planes: [Vec<T>; 4],
    height: usize,
    width: usize,
}

impl<T: Real> Quads<T> {
    fn new(height: usize, width: usize) -> Self {
        let plane = || vec![T::ZERO; height.div_ceil(2) * width.div_ceil(2) + LANES];
        Self { planes: std::array::from_fn(|_| plane()), height, width }
    }

    fn read(&mut self, plane: &[T]) {
        let cols = self.width.div_ceil(2);
        for (y, line) in plane.chunks_exact(self.width).enumerate() {
            for col in 0..2 {
                let to = &mut self.planes[y % 2 * 2 + col][y / 2 * cols..][..cols];
                let pixels = line.iter().skip(col).step_by(2);
                to.iter_mut().zip(pixels).for_each(|(to, v)| *to = *v);
            }
        }
    }

    fn write(&self, plane: &mut [T], bias: T) {
        let cols = self.width.div_ceil(2);
        for (y, line) in plane.chunks_exact_mut(self.width).enumerate() {
            let of = |col: usize| &self.planes[y % 2 * 2 + col][y / 2 * cols..][..cols];
            let (pairs, last) = line.as_chunks_mut::<2>();
            for ((pair, a), b) in pairs.iter_mut().zip(of(0)).zip(of(1)) {
                *pair = [*a + bias, *b + bias];
            }
            last.iter_mut().for_each(|pixel| *pixel = of(0)[cols - 1] + bias);
        }
    }

    fn count(&self) -> usize {
        self.height.div_ceil(2) * self.width.div_ceil(2)
    }
}

/// Values of neighbouring tiles.
type Lanes<T> = [T; LANES];

/// Number of tiles transformed at once.
const LANES: usize = 16;

#[inline(always)]
fn load<T: Real>(from: &[T], at: usize) -> Lanes<T> {
    *from[at..].first_chunk().expect("every plane has room for whole vectors")
}

#[inline(always)]
fn store<T: Real>(to: &mut [T], at: usize, lanes: Lanes<T>) {
    *to[at..].first_chunk_mut().expect("every plane has room for whole vectors") = lanes;
}

#[inline(always)]
fn zero<T: Real>() -> Lanes<T> {
    [T::ZERO; LANES]
}

// Without `array::from_fn`: its calls would not be inlined, and therefore not compiled for wide
// vectors.

#[inline(always)]
fn add<T: Real>(a: Lanes<T>, b: Lanes<T>) -> Lanes<T> {
    let mut sum = a;
    sum.iter_mut().zip(b).for_each(|(sum, b)| *sum += b);
    sum
}

#[inline(always)]
fn sub<T: Real>(a: Lanes<T>, b: Lanes<T>) -> Lanes<T> {
    let mut difference = a;
    difference.iter_mut().zip(b).for_each(|(difference, b)| *difference -= b);
    difference
}

/// Applies a transformation to each column, then to each row of the result. Takes a name, not a
/// function, for the same reason.
macro_rules! both_ways {
    ($x:expr, $transform:ident, $n:literal to $m:literal) => {{
        let x: [[Lanes<T>; $n]; $n] = $x;
        let mut half = [[zero(); $n]; $m];
        for col in 0..$n {
            let mut column = [zero(); $n];
            for row in 0..$n {
                column[row] = x[row][col];
            }
            let column = $transform(column);
            for row in 0..$m {
                half[row][col] = column[row];
            }
        }
        let mut y = [[zero(); $m]; $m];
        for row in 0..$m {
            y[row] = $transform(half[row]);
        }
        y
    }};
}

/// `B'` times a column.
#[inline(always)]
fn of_input<T: Real>([a, b, c, d]: [Lanes<T>; 4]) -> [Lanes<T>; 4] {
    [sub(a, c), add(b, c), sub(c, b), sub(b, d)]
}

/// `B` times a column.
#[inline(always)]
fn to_input<T: Real>([a, b, c, d]: [Lanes<T>; 4]) -> [Lanes<T>; 4] {
    [a, add(sub(b, c), d), add(sub(b, a), c), sub(zero(), d)]
}

/// `A'` times a column.
#[inline(always)]
fn to_output<T: Real>([a, b, c, d]: [Lanes<T>; 4]) -> [Lanes<T>; 2] {
    [add(add(a, b), c), sub(sub(b, c), d)]
}

/// `A` times a column.
#[inline(always)]
fn of_output<T: Real>([a, b]: [Lanes<T>; 2]) -> [Lanes<T>; 4] {
    [a, add(a, b), sub(a, b), sub(zero(), b)]
}

/// `B' x B` from [`Phases`], into the sixteen matrices from `to` on. The last vector may write past
/// the tiles of the plane; the next plane overwrites these values.
struct ToV<'a, T> {
    phases: &'a Phases<T>,
    v: &'a mut Sixteen<T>,
    to: usize,
}

impl<T: Real> Kernel for ToV<'_, T> {
    #[inline(always)]
    fn run(self) {
        let Self { phases, v, to } = self;
        for tile in (0..phases.rows * phases.cols).step_by(LANES) {
            let mut x = [[zero(); 4]; 4];
            for (row, x) in x.iter_mut().enumerate() {
                for (col, x) in x.iter_mut().enumerate() {
                    let (plane, first) = phases.at(row, col);
                    *x = load(&phases.planes[plane], first + tile);
                }
            }
            let y = both_ways!(x, of_input, 4 to 4);
            for (at, lanes) in y.as_flattened().iter().enumerate() {
                store(v.of_mut(at), to + tile, *lanes);
            }
        }
    }
}

/// The transpose of [`ToV`]: `B dv B'`, added to the phases.
struct FromV<'a, T> {
    v: &'a Sixteen<T>,
    from: usize,
    phases: &'a mut Phases<T>,
}

impl<T: Real> Kernel for FromV<'_, T> {
    #[inline(always)]
    fn run(self) {
        let Self { v, from, phases } = self;
        let tiles = phases.rows * phases.cols;
        for tile in (0..tiles).step_by(LANES) {
            let live = (tiles - tile).min(LANES);
            let mut dv = [[zero(); 4]; 4];
            for (at, lanes) in dv.as_flattened_mut().iter_mut().enumerate() {
                *lanes = load(v.of(at), from + tile);
                // The values after the last tile belong to another image.
                lanes[live..].fill(T::ZERO);
            }
            let dx = both_ways!(dv, to_input, 4 to 4);
            for (row, lanes) in dx.iter().enumerate() {
                for (col, lanes) in lanes.iter().enumerate() {
                    let (plane, first) = phases.at(row, col);
                    let sum = add(load(&phases.planes[plane], first + tile), *lanes);
                    store(&mut phases.planes[plane], first + tile, sum);
                }
            }
        }
    }
}

/// `A' m A` from the sixteen matrices, from `from` on.
struct FromM<'a, T> {
    m: &'a Sixteen<T>,
    from: usize,
    quads: &'a mut Quads<T>,
}

impl<T: Real> Kernel for FromM<'_, T> {
    #[inline(always)]
    fn run(self) {
        let Self { m, from, quads } = self;
        for tile in (0..quads.count()).step_by(LANES) {
            let mut x = [[zero(); 4]; 4];
            for (at, lanes) in x.as_flattened_mut().iter_mut().enumerate() {
                *lanes = load(m.of(at), from + tile);
            }
            let y = both_ways!(x, to_output, 4 to 2);
            for (plane, lanes) in quads.planes.iter_mut().zip(y.as_flattened()) {
                store(plane, tile, *lanes);
            }
        }
    }
}

/// The transpose of [`FromM`]: `A dy A'`, into the sixteen matrices from `to` on, like [`ToV`].
struct ToM<'a, T> {
    quads: &'a Quads<T>,
    m: &'a mut Sixteen<T>,
    to: usize,
}

impl<T: Real> Kernel for ToM<'_, T> {
    #[inline(always)]
    fn run(self) {
        let Self { quads, m, to } = self;
        for tile in (0..quads.count()).step_by(LANES) {
            let mut dy = [[zero(); 2]; 2];
            for (plane, lanes) in quads.planes.iter().zip(dy.as_flattened_mut()) {
                *lanes = load(plane, tile);
            }
            let dm = both_ways!(dy, of_output, 2 to 4);
            for (at, lanes) in dm.as_flattened().iter().enumerate() {
                store(m.of_mut(at), to + tile, *lanes);
            }
        }
    }
}

/// `G` times a column of a kernel.
fn widen<T: Real>([a, b, c]: [T; 3]) -> [T; 4] {
    let half = T::of(0.5);
    [a, half * (a + b + c), half * (a - b + c), c]
}

/// `G'` times a column, the transpose of [`widen`].
fn narrow<T: Real>([a, b, c, d]: [T; 4]) -> [T; 3] {
    let half = T::of(0.5);
    [a + half * (b + c), half * (b - c), half * (b + c) + d]
}
