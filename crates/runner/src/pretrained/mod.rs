//! Reads pretrained weights: safetensors files, and files written by PyTorch's `torch.save`.
//!
//! [`Weights::read`] reads a file, [`ReviseKeys`] renames its tensors, [`Weights::transpose`]
//! transposes some, [`Weights::fit`] compares them with a model's: the [`Fit`] maps the model's
//! tensors to the file's, and its [`Report`] lists the names of missing, unexpected and mismatched
//! tensors. This module depends on names, shapes and bytes only, not on a run or an engine.

mod report;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs;
use std::ops::Range;
use std::path::Path;

use regex::Regex;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::Value;

pub(crate) use self::report::Report;

/// Result whose error text does not include the file's name.
type Result<T, E = String> = std::result::Result<T, E>;

/// Renames a file's tensors by regular expressions and replacements, applied in order, each to all
/// matches.
///
/// Follows: mmengine 0.10.7, `runner/checkpoint.py`, `revise_keys`. Replacements have Python's
/// syntax (`\1`, `\g<name>`), expressions that of the crate `regex`, without look-around and
/// back-references.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReviseKeys(Vec<(Regex, String)>);

impl ReviseKeys {
    /// Compiles pairs of expression and replacement.
    pub(crate) fn new(pairs: &[(String, String)]) -> Result<Self> {
        let pair = |(pattern, replacement): &(String, String)| {
            Ok((compile(pattern)?, rust_replacement(replacement)))
        };
        pairs.iter().map(pair).collect::<Result<_>>().map(Self)
    }

    fn apply(&self, name: &str) -> String {
        let revise = |name: String, (regex, replacement): &(Regex, String)| {
            regex.replace_all(&name, replacement).into_owned()
        };
        self.0.iter().fold(name.to_owned(), revise)
    }
}

/// Compiles a regular expression.
pub(crate) fn compile(pattern: &str) -> Result<Regex> {
    Regex::new(pattern).map_err(|e| format!("`{pattern}`: {e}"))
}

/// Converts a replacement from Python's syntax to that of `regex`.
fn rust_replacement(python: &str) -> String {
    let (mut out, mut rest) = (String::new(), python);
    while let Some(at) = rest.find(['\\', '$']) {
        out += &rest[..at];
        let after = &rest[at + 1..];
        let digits = after.len() - after.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let named = after.strip_prefix("g<").and_then(|name| name.split_once('>'));
        (out, rest) = match (rest.as_bytes()[at], digits, named) {
            (b'$', ..) => (out + "$$", after),
            (_, 1.., _) => (format!("{out}${{{}}}", &after[..digits]), &after[digits..]),
            (_, _, Some((name, after))) => (format!("{out}${{{name}}}"), after),
            // An escaped character, such as `\.`.
            _ => (out, after),
        };
    }
    out + rest
}

/// Tensors of a file.
#[derive(Debug, Default)]
pub(crate) struct Weights {
    buffers: Vec<Vec<u8>>,
    tensors: Vec<Saved>,
    /// Names of the files, for errors.
    files: Vec<String>,
    /// Types of tensors that were left out, such as `int8`.
    unread: Vec<&'static str>,
}

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq)]
struct Saved {
    name: String,
    shape: Vec<usize>,
    dtype: Dtype,
    buffer: usize,
    range: Range<usize>,
    /// Index of its file.
    file: usize,
    /// Whether it was `f64`, of which `dtype` is the conversion.
    was_f64: bool,
    /// Why its elements cannot be used, if so; they are absent then.
    problem: Option<String>,
}

impl Weights {
    /// Reads a `.safetensors` file, a `.safetensors.index.json` with the files it lists, or
    /// PyTorch's `.pth`, `.pt` or `.bin`, in which the state dict may be under `state_dict` or
    /// `model`.
    pub(crate) fn read(path: &Path, revise: &ReviseKeys) -> Result<Self> {
        let mut weights = Self::default();
        match kind(path) {
            Some(Kind::Index) => weights.add_index(path)?,
            _ => weights.add_file(path)?,
        }
        if weights.tensors.is_empty() {
            return Err(
                "contains no tensors at the top level or under `state_dict` or `model`: save a state dict"
                    .to_owned(),
            );
        }
        let mut seen: HashMap<String, (String, usize)> = HashMap::new();
        for tensor in &mut weights.tensors {
            let (revised, at) = (revise.apply(&tensor.name), tensor.file);
            let old = std::mem::replace(&mut tensor.name, revised.clone());
            match seen.insert(revised.clone(), (old.clone(), at)) {
                Some((other, file)) if other == old => {
                    let [a, b] = [file, at].map(|file| &weights.files[file]);
                    return Err(format!(
                        "`{old}` is in two of the files, {a} and {b}: remove or download the outdated one"
                    ));
                }
                Some((other, _)) => {
                    return Err(format!(
                        "revise_keys renames both `{other}` and `{old}` to `{revised}`"
                    ));
                }
                None => {}
            }
        }
        Ok(weights)
    }

    fn add_file(&mut self, path: &Path) -> Result<()> {
        self.files.push(path.file_name().unwrap_or_default().to_string_lossy().into_owned());
        match kind(path) {
            Some(Kind::Safetensors) => self.add_safetensors(path),
            Some(Kind::PyTorch) => self.add_pytorch(path),
            _ => Err(format!("unknown format: supported are {FORMATS}")),
        }
    }

    /// Transposes the matrices whose renamed names match one of these regular expressions.
    pub(crate) fn transpose(&mut self, patterns: &[String]) -> Result<()> {
        let mut found = BTreeSet::new();
        for pattern in patterns {
            let regex = compile(pattern)?;
            let fits = |at: &usize| regex.is_match(&self.tensors[*at].name);
            let count = found.len();
            found.extend((0..self.tensors.len()).filter(fits));
            if found.len() == count {
                return Err(format!(
                    "load_from.transpose: `{pattern}` matches no tensor, or only tensors that an earlier pattern matches"
                ));
            }
        }
        for at in found {
            let Saved { name, shape, .. } = &self.tensors[at];
            let [rows, columns] = shape[..] else {
                return Err(format!("load_from.transpose: `{name}` is {shape:?}, not a matrix"));
            };
            let bytes = self.bytes(at);
            let size = bytes.len() / (rows * columns).max(1);
            let element = |at: usize| &bytes[at * size..][..size];
            let column = |column| (0..rows).flat_map(move |row| element(row * columns + column));
            let transposed: Vec<u8> = (0..columns).flat_map(column).copied().collect();
            let tensor = &mut self.tensors[at];
            tensor.shape = vec![columns, rows];
            (tensor.buffer, tensor.range) = (self.buffers.len(), 0..transposed.len());
            self.buffers.push(transposed);
        }
        Ok(())
    }

    /// Returns type, shape and elements of a tensor.
    pub(crate) fn view(&self, index: usize) -> Result<TensorView<'_>> {
        let Saved { name, shape, dtype, buffer, range, .. } = &self.tensors[index];
        TensorView::new(*dtype, shape.clone(), &self.buffers[*buffer][range.clone()])
            .map_err(|e| format!("`{name}`: {e}"))
    }

    fn bytes(&self, index: usize) -> &[u8] {
        let Saved { buffer, range, .. } = &self.tensors[index];
        &self.buffers[*buffer][range.clone()]
    }

    fn add_safetensors(&mut self, path: &Path) -> Result<()> {
        let bytes = fs::read(path).map_err(|e| format!("cannot read: {e}"))?;
        let (header, metadata) = SafeTensors::read_metadata(&bytes).map_err(|e| e.to_string())?;
        let mut tensors: Vec<_> = metadata.tensors().into_iter().collect();
        tensors.sort_unstable_by_key(|(_, info)| info.data_offsets);
        for (name, info) in tensors {
            // The header follows its length of eight bytes.
            let (start, end) = (info.data_offsets.0 + header + 8, info.data_offsets.1 + header + 8);
            if info.dtype == Dtype::F64 {
                self.add_f64(name, info.shape.clone(), &bytes[start..end]);
                continue;
            }
            self.tensors.push(Saved {
                name,
                shape: info.shape.clone(),
                dtype: info.dtype,
                buffer: usize::MAX,
                range: start..end,
                file: self.files.len() - 1,
                was_f64: false,
                problem: None,
            });
        }
        self.buffers.push(bytes);
        let last = self.buffers.len() - 1;
        self.tensors.iter_mut().filter(|t| t.buffer == usize::MAX).for_each(|t| t.buffer = last);
        Ok(())
    }

    /// Reads the files listed in a `weight_map`.
    fn add_index(&mut self, path: &Path) -> Result<()> {
        let text = fs::read(path).map_err(|e| format!("cannot read: {e}"))?;
        let index: Value = serde_json::from_slice(&text).map_err(|e| e.to_string())?;
        let map = index["weight_map"].as_object().ok_or("has no `weight_map`")?;
        let mut listed: BTreeMap<&str, Vec<&String>> = BTreeMap::new();
        for (name, file) in map {
            let file = file.as_str().ok_or_else(|| format!("`{name}` has no file: {file}"))?;
            listed.entry(file).or_default().push(name);
        }
        for (file, names) in listed {
            let (path, first) = (path.with_file_name(file), self.tensors.len());
            self.add_file(&path).map_err(|why| format!("{}: {why}", path.display()))?;
            let has: HashSet<&String> = self.tensors[first..].iter().map(|t| &t.name).collect();
            if let Some(name) = names.into_iter().find(|name| !has.contains(name)) {
                return Err(format!(
                    "lists `{name}` in {file}, which does not have it: index and files are of different versions or \
                     incomplete; download them again"
                ));
            }
        }
        Ok(())
    }

    /// Adds a tensor converted to `f32`, because models have no `f64`.
    fn add_f64(&mut self, name: String, shape: Vec<usize>, bytes: &[u8]) {
        let values = bytes.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b));
        self.add_doubles(name, shape, values);
    }

    fn add_doubles(
        &mut self,
        name: String,
        shape: Vec<usize>,
        values: impl Iterator<Item = f64> + Clone,
    ) {
        let is_beyond = |x: &f64| x.is_finite() && (*x as f32).is_infinite();
        let problem = values.clone().find(is_beyond).map(|x| {
            format!(
                "contains {x:e} in f64, which is out of range of the f32 that it is converted to"
            )
        });
        let bytes = values.flat_map(|x| (x as f32).to_le_bytes()).collect();
        self.add(name, shape, Dtype::F32, bytes);
        if let Some(added) = self.tensors.last_mut() {
            (added.was_f64, added.problem) = (true, problem);
        }
    }

    fn add(&mut self, name: String, shape: Vec<usize>, dtype: Dtype, bytes: Vec<u8>) {
        let (buffer, range) = (self.buffers.len(), 0..bytes.len());
        self.buffers.push(bytes);
        let (file, was_f64, problem) = (self.files.len() - 1, false, None);
        self.tensors.push(Saved { name, shape, dtype, buffer, range, file, was_f64, problem });
    }

    #[cfg(not(feature = "candle"))]
    fn add_pytorch(&mut self, _: &Path) -> Result<()> {
        Err("PyTorch files need the feature `candle`: convert the file to .safetensors".to_owned())
    }

    #[cfg(feature = "candle")]
    fn add_pytorch(&mut self, path: &Path) -> Result<()> {
        use candle_core::pickle::PthTensors;
        let failed = |e: candle_core::Error| {
            let why = e.to_string();
            let why = why.lines().next().unwrap_or_default();
            format!(
                "not a state dict that torch.save of PyTorch 1.6 or later has written ({why}): load it in PyTorch \
                 and save its `state_dict()` alone"
            )
        };
        // A missing key is an error of `PthTensors::new`; the last attempt reads the top level.
        let under = |key| PthTensors::new(path, key).ok().filter(|t| !t.tensor_infos().is_empty());
        let file = match ["state_dict", "model"].into_iter().find_map(|key| under(Some(key))) {
            Some(file) => file,
            None => PthTensors::new(path, None).map_err(failed)?,
        };
        let first_line = |e: candle_core::Error| e.to_string().lines().next().map(str::to_owned);
        let infos: BTreeMap<_, _> = file.tensor_infos().iter().collect();
        for (name, info) in infos {
            let layout = &info.layout;
            if !layout.is_contiguous() && !layout.is_fortran_contiguous() {
                self.add(name.clone(), layout.dims().to_vec(), Dtype::F32, Vec::new());
                let problem = format!(
                    "is not contiguous (strides {:?}: channels_last, a slice, or expand): in PyTorch, save \
                     `{{k: v.contiguous() for k, v in model.state_dict().items()}}`",
                    layout.stride()
                );
                self.tensors.last_mut().into_iter().for_each(|t| t.problem = Some(problem.clone()));
                continue;
            }
            let added = file.get(name).and_then(|tensor| match tensor {
                Some(tensor) => self.add_candle(name, &tensor),
                None => Ok(()),
            });
            added.map_err(|e| format!("`{name}`: {}", first_line(e).unwrap_or_default()))?;
        }
        self.unread.extend(types_unread(path).map_err(|e| format!("cannot read: {e}"))?);
        Ok(())
    }

    #[cfg(feature = "candle")]
    fn add_candle(&mut self, name: &str, tensor: &candle_core::Tensor) -> candle_core::Result<()> {
        use candle_core::DType;
        let (flat, shape) = (tensor.flatten_all()?, tensor.dims().to_vec());
        let (dtype, bytes) = match tensor.dtype() {
            DType::F16 => {
                let values = flat.to_vec1::<half::f16>()?;
                (Dtype::F16, values.iter().flat_map(|x| x.to_le_bytes()).collect())
            }
            DType::BF16 => {
                let values = flat.to_vec1::<half::bf16>()?;
                (Dtype::BF16, values.iter().flat_map(|x| x.to_le_bytes()).collect())
            }
            DType::F32 => {
                let values = flat.to_vec1::<f32>()?;
                (Dtype::F32, values.iter().flat_map(|x| x.to_le_bytes()).collect())
            }
            DType::F64 => {
                let values = flat.to_vec1::<f64>()?;
                self.add_doubles(name.to_owned(), shape, values.iter().copied());
                return Ok(());
            }
            // Models have no such types; only name and type are used.
            DType::U8 => (Dtype::U8, Vec::new()),
            _ => (Dtype::I64, Vec::new()),
        };
        self.add(name.to_owned(), shape, dtype, bytes);
        Ok(())
    }

    /// Maps a model's tensors, `wanted` by names and shapes, to those of the file.
    ///
    /// A `weight` or `bias` missing in the file may be called `gamma` or `beta` there, as in older
    /// norm layers. Not reported as unexpected: a tensor whose elements equal those of a used
    /// tensor (files may contain a tied weight under both names), and a batch norm's
    /// `num_batches_tracked`.
    pub(crate) fn fit(&self, wanted: &[(&str, &[usize])]) -> Fit {
        let index: HashMap<&str, usize> =
            self.tensors.iter().enumerate().map(|(at, tensor)| (&*tensor.name, at)).collect();
        let mut report = Report { unread: self.unread.join(", "), ..Report::default() };
        let mut used = BTreeSet::new();
        let mut place = |(name, shape): &(&str, &[usize])| {
            let old = ["weight:gamma", "bias:beta"].iter().find_map(|pair| {
                let (new, old) = pair.split_once(':')?;
                let layer = name.strip_suffix(new).filter(|p| p.is_empty() || p.ends_with('.'))?;
                index.get(&*format!("{layer}{old}"))
            });
            let Some(&at) = index.get(name).or(old) else {
                // A missing adapter keeps its initial values.
                if [".lora_A.weight", ".lora_B.weight"].iter().any(|end| name.ends_with(end)) {
                    return None;
                }
                report.missing.push((*name).to_owned());
                return None;
            };
            used.insert(at);
            let Saved { shape: is, dtype, .. } = &self.tensors[at];
            if !matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) {
                report.mismatched.push(format!("`{name}` is {dtype:?}"));
                return None;
            }
            if is != shape {
                let is_transposed = shape.len() == 2 && is.iter().eq(shape.iter().rev());
                let how = if is_transposed {
                    " (transposed: list it in `transpose` of load_from)"
                } else {
                    ""
                };
                let text = format!("`{name}` is {is:?}, the model has {shape:?}{how}");
                report.mismatched.push(text);
                return None;
            }
            Some(at)
        };
        let sources: Vec<Option<usize>> = wanted.iter().map(&mut place).collect();
        report.used = sources.iter().flatten().count();
        let doubles = sources.iter().flatten().filter(|at| self.tensors[**at].was_f64);
        report.doubles = doubles.count();
        report.tied = self.tied(wanted, &sources, &report.missing);
        let taken: BTreeSet<_> = sources.iter().flatten().map(|at| self.bytes(*at)).collect();
        let is_spare = |at: &usize| {
            let Saved { name, shape, .. } = &self.tensors[*at];
            // Biases may be equal because all are zero.
            let is_tied = shape.len() > 1 && taken.contains(self.bytes(*at));
            !is_tied && !name.ends_with("num_batches_tracked")
        };
        let spare = (0..self.tensors.len()).filter(|at| !used.contains(at)).filter(is_spare);
        report.left_over = spare.map(|at| self.tensors[at].name.clone()).collect();
        Fit { sources, report }
    }

    /// Returns a missing matrix and a used table of embeddings of the same shape: a file may
    /// contain only one of two tied weights.
    fn tied(
        &self,
        wanted: &[(&str, &[usize])],
        sources: &[Option<usize>],
        missing: &[String],
    ) -> Option<(String, String)> {
        let is_table = |name: &str| ["emb", "wte", "tok"].iter().any(|part| name.contains(part));
        let is_missing = |name: &str| missing.iter().any(|missing| missing == name);
        let (head, shape) = wanted.iter().find(|(name, shape)| {
            shape.len() == 2 && !is_table(name) && name.ends_with("weight") && is_missing(name)
        })?;
        let used = wanted.iter().zip(sources).filter(|(_, source)| source.is_some());
        let table = used.map(|(of, _)| of).find(|(name, is)| is == shape && is_table(name))?;
        Some(((*head).to_owned(), table.0.to_owned()))
    }

    /// Checks the elements of the tensors that a model takes. Returns the names of those that
    /// contain NaN or an infinity.
    pub(crate) fn check(&self, sources: &[Option<usize>]) -> Result<Vec<String>> {
        let mut non_finite = Vec::new();
        for at in sources.iter().flatten() {
            let Saved { name, dtype, problem, .. } = &self.tensors[*at];
            if let Some(problem) = problem {
                return Err(format!("`{name}` {problem}"));
            }
            if !is_finite(*dtype, self.bytes(*at)) {
                non_finite.push(format!("`{name}`"));
            }
        }
        Ok(non_finite)
    }
}

/// Returns whether all elements of a floating-point type are finite.
fn is_finite(dtype: Dtype, bytes: &[u8]) -> bool {
    let halves = |exponent: u16| {
        let mut bits = bytes.as_chunks().0.iter().map(|b| u16::from_le_bytes(*b));
        bits.all(|bits| bits & exponent != exponent)
    };
    match dtype {
        Dtype::F16 => halves(0x7c00),
        Dtype::BF16 => halves(0x7f80),
        _ => bytes.as_chunks().0.iter().all(|b| f32::from_le_bytes(*b).is_finite()),
    }
}

/// Returns the types of a PyTorch file's tensors that candle leaves out. It does not tell their
/// names, so this looks for the types' names in the pickle, which is the file's first record and
/// not compressed.
#[cfg(feature = "candle")]
fn types_unread(path: &Path) -> std::io::Result<Vec<&'static str>> {
    use std::io::Read;
    const SEARCHED: u64 = 16 << 20;
    let mut start = Vec::new();
    fs::File::open(path)?.take(SEARCHED).read_to_end(&mut start)?;
    let types = [
        ("CharStorage", "int8"),
        ("ShortStorage", "int16"),
        ("IntStorage", "int32"),
        ("BoolStorage", "bool"),
        ("QInt8Storage", "qint8"),
        ("QUInt8Storage", "quint8"),
        ("ComplexFloatStorage", "complex64"),
    ];
    let has = |(class, _): &(&str, &str)| {
        let line = format!("\n{class}\n");
        start.windows(line.len()).any(|at| at == line.as_bytes())
    };
    Ok(types.into_iter().filter(has).map(|(_, name)| name).collect())
}

/// Mapping of a model's tensors to those of a file.
#[derive(Debug)]
pub(crate) struct Fit {
    /// For each tensor of the model, the index of the file's tensor.
    pub(crate) sources: Vec<Option<usize>>,
    pub(crate) report: Report,
}

/// Supported formats, for messages.
pub(crate) const FORMATS: &str =
    "a .safetensors file, its .safetensors.index.json, or a .pth, .pt or .bin of PyTorch";

enum Kind {
    Safetensors,
    Index,
    PyTorch,
}

fn kind(path: &Path) -> Option<Kind> {
    let name = path.file_name()?.to_str()?.to_ascii_lowercase();
    let ends = |end: &str| name.ends_with(end);
    match () {
        () if ends(".safetensors") => Some(Kind::Safetensors),
        () if ends(".index.json") => Some(Kind::Index),
        () if [".pth", ".pt", ".bin"].into_iter().any(ends) => Some(Kind::PyTorch),
        () => None,
    }
}

/// Returns whether files with this name can be read.
pub(crate) fn is_known(path: &Path) -> bool {
    kind(path).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(feature = "candle")]
    fn vectors(name: &str) -> std::path::PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors").join(name)
    }

    fn revise(pairs: &[(&str, &str)]) -> Result<ReviseKeys> {
        let pairs: Vec<_> = pairs.iter().map(|(a, b)| ((*a).into(), (*b).into())).collect();
        ReviseKeys::new(&pairs)
    }

    fn values(weights: &Weights, index: usize) -> Vec<f32> {
        let view = weights.view(index).unwrap();
        match view.dtype() {
            Dtype::F32 => {
                view.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
            }
            Dtype::F16 => {
                let halves = view.data().as_chunks().0.iter();
                halves.map(|b| half::f16::from_le_bytes(*b).to_f32()).collect()
            }
            other => panic!("{other:?}"),
        }
    }

    fn save(path: &Path, tensors: &[(&str, &[usize], &[f32])]) {
        let bytes = |values: &[f32]| values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let bytes: Vec<Vec<u8>> = tensors.iter().map(|tensor| bytes(tensor.2)).collect();
        let views = tensors.iter().zip(&bytes).map(|((name, shape, _), bytes)| {
            (*name, TensorView::new(Dtype::F32, shape.to_vec(), bytes).unwrap())
        });
        fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
    }

    #[cfg(feature = "candle")]
    #[test]
    fn pytorch_state_dict_is_read_from_a_checkpoint() {
        let keys = revise(&[(r"^module\.", ""), (r"(n)orm", r"\1")]).unwrap();
        let weights = Weights::read(&vectors("pretrained.pth"), &keys).unwrap();
        let wanted: [(&str, &[usize]); 5] = [
            ("embed.weight", &[5, 3]),
            ("fc.weight", &[4, 3]),
            ("fc.bias", &[4]),
            ("n.weight", &[4]),
            ("n.bias", &[4]),
        ];
        let Fit { sources, report } = weights.fit(&wanted);
        assert_eq!(report.to_string(), "missing: `n.bias`");
        assert_eq!(report.used, 4);
        let eighths = |n: &[u8]| n.iter().map(|n| f32::from(*n) / 8.0).collect::<Vec<_>>();
        let of = |at: usize| values(&weights, sources[at].unwrap());
        assert_eq!(of(0), eighths(&(0..15).collect::<Vec<_>>()));
        assert_eq!(of(1), eighths(&[0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]));
        assert_eq!(of(2), eighths(&[0, 1, 2, 3]));
        assert_eq!(of(3), eighths(&[0, 1, 2, 3]));
        let plain = Weights::read(&vectors("pretrained_plain.pth"), &ReviseKeys::default());
        assert!(plain.unwrap().fit(&[("weight", &[2, 3]), ("bias", &[2])]).report.is_exact());
    }

    #[test]
    fn mismatches_are_listed_by_name_with_a_hint() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.safetensors");
        save(&path, &[("bert.a", &[2], &[1.0, 2.0]), ("bert.b", &[1], &[3.0])]);
        let weights = Weights::read(&path, &ReviseKeys::default()).unwrap();
        let report = weights.fit(&[("a", &[2]), ("b", &[1])]).report;
        assert_eq!(
            report.to_string(),
            "missing: `a`, `b`; unexpected: `bert.a`, `bert.b`; try revise_keys = [['^bert\\.', '']]"
        );
        let weights = Weights::read(&path, &revise(&[("bert.", "")]).unwrap()).unwrap();
        let report = weights.fit(&[("a", &[3]), ("b", &[1])]).report;
        assert_eq!(report.to_string(), "mismatched: `a` is [2], the model has [3]");
        let report = weights.fit(&[("x.a", &[2]), ("x.b", &[1])]).report;
        assert!(report.to_string().contains("revise_keys = [['^', 'x.']]"), "{report}");
        let many: Vec<_> = (0..20).map(|i| format!("layer{i}")).collect();
        let wanted: Vec<_> = many.iter().map(|name| (&**name, &[1_usize][..])).collect();
        let text = weights.fit(&wanted).report.to_string();
        assert!(text.contains("`layer9` and 10 more; unexpected: `a`, `b`"), "{text}");
    }

    #[test]
    fn matrices_are_transposed_by_name_pattern() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("gpt2.safetensors");
        let (matrix, bias): ([f32; 6], _) = ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [7.0, 8.0, 9.0]);
        let file: [(&str, &[usize], &[f32]); 3] = [
            ("c.weight", &[2, 3], &matrix),
            ("c.bias", &[3], &bias),
            ("d.weight", &[2, 3], &matrix),
        ];
        save(&path, &file);
        let turn = |patterns: &[&str]| {
            let mut weights = Weights::read(&path, &ReviseKeys::default()).unwrap();
            let patterns: Vec<_> = patterns.iter().map(|pattern| (*pattern).to_owned()).collect();
            weights.transpose(&patterns).map(|()| weights)
        };
        let wanted: [(&str, &[usize]); 3] =
            [("c.weight", &[3, 2]), ("c.bias", &[3]), ("d.weight", &[2, 3])];
        let weights = turn(&[r"^c\.weight$"]).unwrap();
        let Fit { sources, report } = weights.fit(&wanted);
        assert!(report.is_exact(), "{report}");
        let of = |at: usize| values(&weights, sources[at].unwrap());
        assert_eq!((of(0), of(2)), (vec![1.0, 4.0, 2.0, 5.0, 3.0, 6.0], matrix.to_vec()));
        let text = turn(&[]).unwrap().fit(&wanted).report.to_string();
        assert!(
            text.contains(
                "`c.weight` is [2, 3], the model has [3, 2] (transposed: list it in `transpose`"
            ),
            "{text}"
        );
        for (pattern, expected) in
            [("bias", "`c.bias` is [3]"), ("x", "`x` matches"), ("(", "`(`: ")]
        {
            let why = turn(&[pattern]).unwrap_err();
            assert!(why.contains(expected), "{why}");
        }
    }

    #[test]
    fn files_of_an_index_are_read() {
        let dir = tempfile::tempdir().unwrap();
        save(&dir.path().join("1.safetensors"), &[("a", &[1], &[1.0])]);
        save(&dir.path().join("2.safetensors"), &[("b", &[1], &[2.0])]);
        let index = dir.path().join("model.safetensors.index.json");
        let map = r#"{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}"#;
        fs::write(&index, map).unwrap();
        let weights = Weights::read(&index, &ReviseKeys::default()).unwrap();
        let fit = weights.fit(&[("b", &[1]), ("a", &[1])]);
        assert_eq!(
            fit.sources.iter().map(|at| values(&weights, at.unwrap())[0]).collect::<Vec<_>>(),
            [2.0, 1.0]
        );
        fs::remove_file(dir.path().join("2.safetensors")).unwrap();
        let why = Weights::read(&index, &ReviseKeys::default()).unwrap_err();
        assert!(why.contains("2.safetensors: cannot read"), "{why}");
    }

    #[test]
    fn index_that_disagrees_with_its_files_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let index = dir.path().join("model.safetensors.index.json");
        let read = |map: &str| {
            fs::write(&index, format!(r#"{{"weight_map": {map}}}"#)).unwrap();
            Weights::read(&index, &ReviseKeys::default()).map(|_| ()).unwrap_err()
        };
        save(&dir.path().join("1.safetensors"), &[("a", &[1], &[1.0]), ("b", &[1], &[1.0])]);
        save(&dir.path().join("2.safetensors"), &[("b", &[1], &[2.0])]);
        let why = read(r#"{"a": "1.safetensors", "b": "2.safetensors"}"#);
        let twice = "`b` is in two of the files, 1.safetensors and 2.safetensors";
        assert!(why.starts_with(twice), "{why}");
        let why = read(r#"{"b": "2.safetensors", "c": "2.safetensors"}"#);
        assert!(why.starts_with("lists `c` in 2.safetensors, which does not have it"), "{why}");
        assert!(read(r#"{"b": 2}"#).contains("`b` has no file"));
        assert!(read(r#"{"b": "3.onnx"}"#).contains("3.onnx: unknown format"));
    }

    #[cfg(feature = "candle")]
    #[test]
    fn index_of_pytorch_files_is_read() {
        let dir = tempfile::tempdir().unwrap();
        fs::copy(vectors("pretrained_plain.pth"), dir.path().join("1.bin")).unwrap();
        let index = dir.path().join("pytorch_model.bin.index.json");
        fs::write(&index, r#"{"weight_map": {"weight": "1.bin", "bias": "1.bin"}}"#).unwrap();
        let weights = Weights::read(&index, &ReviseKeys::default()).unwrap();
        assert!(weights.fit(&[("weight", &[2, 3]), ("bias", &[2])]).report.is_exact());
    }

    #[cfg(feature = "candle")]
    #[test]
    fn unusual_tensors_of_pytorch_are_named_if_they_are_needed() {
        let weights =
            Weights::read(&vectors("pretrained_odd.pth"), &ReviseKeys::default()).unwrap();
        let check = |wanted: (&str, &[usize])| {
            let Fit { sources, report } = weights.fit(&[("plain.weight", &[2, 3]), wanted]);
            (weights.check(&sources).map_err(|why| why.clone()), report.to_string())
        };
        let (checked, report) = check(("x.bias", &[2]));
        assert_eq!(checked.unwrap(), [""; 0]);
        assert!(
            report.contains("; the file also has tensors of int8, which cannot be read"),
            "{report}"
        );
        let cases: [(&str, &[usize], &str); 3] = [
            ("conv.weight", &[2, 3, 1, 2], "is not contiguous (strides [6, 1, 6, 3]"),
            ("expanded.weight", &[3, 2], "v.contiguous() for k, v in model.state_dict().items()"),
            ("double.weight", &[2], "contains 1e39 in f64"),
        ];
        for (name, shape, says) in cases {
            let why = check((name, shape)).0.unwrap_err();
            assert!(why.starts_with(&format!("`{name}` ")) && why.contains(says), "{why}");
        }
        assert!(check(("bytes.weight", &[2])).1.contains("`bytes.weight` is U8"));
    }

    #[test]
    fn doubles_are_converted_unless_out_of_range() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.safetensors");
        let wanted: [(&str, &[usize]); 2] = [("a", &[2]), ("b", &[1])];
        let read = |values: [f64; 3]| {
            let bytes = |values: &[f64]| values.iter().flat_map(|x| x.to_le_bytes()).collect();
            let tensors: [Vec<u8>; 2] = [bytes(&values[..2]), bytes(&values[2..])];
            let views = [("a", 2, &tensors[0]), ("b", 1, &tensors[1])].map(|(name, len, bytes)| {
                (name, TensorView::new(Dtype::F64, vec![len], bytes).unwrap())
            });
            fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
            let weights = Weights::read(&path, &ReviseKeys::default()).unwrap();
            let Fit { sources, report } = weights.fit(&wanted);
            assert_eq!(report.doubles, 2);
            weights.check(&sources)
        };
        assert_eq!(read([1.0, f64::from(f32::MAX), 1e-300]).unwrap(), [""; 0]);
        let why = read([1.0, -1e39, 0.0]).unwrap_err();
        assert!(why.starts_with("`a` contains -1e39 in f64, which is out of range"), "{why}");
        assert_eq!(read([1.0, f64::NAN, f64::INFINITY]).unwrap(), ["`a`", "`b`"]);
    }

    #[test]
    fn values_that_are_not_finite_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.safetensors");
        save(
            &path,
            &[
                ("a", &[2], &[1.0, f32::NAN]),
                ("b", &[1], &[f32::MAX]),
                ("c", &[1], &[f32::INFINITY]),
            ],
        );
        let weights = Weights::read(&path, &ReviseKeys::default()).unwrap();
        let sources = weights.fit(&[("a", &[2]), ("b", &[1])]).sources;
        assert_eq!(weights.check(&sources).unwrap(), ["`a`"]);
        for (dtype, bits, finite) in [
            (Dtype::F16, 0x7c00_u16, false),
            (Dtype::F16, 0x7bff, true),
            (Dtype::BF16, 0xffc0, false),
            (Dtype::BF16, 0x7f7f, true),
        ] {
            assert_eq!(is_finite(dtype, &bits.to_le_bytes()), finite, "{dtype:?} {bits:x}");
        }
    }

    #[test]
    fn names_of_wrappers_and_tied_heads_get_a_hint() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.safetensors");
        save(&path, &[("a._orig_mod.weight", &[2], &[1.0; 2]), ("b.weight", &[1], &[3.0])]);
        let weights = Weights::read(&path, &ReviseKeys::default()).unwrap();
        let wanted: [(&str, &[usize]); 2] = [("a.weight", &[2]), ("b.weight", &[1])];
        let text = weights.fit(&wanted).report.to_string();
        let hint = "try revise_keys = [['\\b_orig_mod\\.', '']]";
        assert!(text.ends_with(hint), "{text}");
        let weights = Weights::read(&path, &revise(&[(r"\b_orig_mod\.", "")]).unwrap()).unwrap();
        assert!(weights.fit(&wanted).report.is_exact());
        save(&path, &[("wte.weight", &[3, 2], &[1.0; 6]), ("norm.weight", &[2], &[3.0; 2])]);
        let weights = Weights::read(&path, &ReviseKeys::default()).unwrap();
        let wanted: [(&str, &[usize]); 3] =
            [("wte.weight", &[3, 2]), ("norm.weight", &[2]), ("head.weight", &[3, 2])];
        let text = weights.fit(&wanted).report.to_string();
        assert!(
            text.contains("`head.weight` has the shape of `wte.weight`: if the two are tied"),
            "{text}"
        );
    }

    #[test]
    fn invalid_file_is_refused_with_a_reason() {
        let dir = tempfile::tempdir().unwrap();
        let read = |name: &str, bytes: &[u8], keys: &ReviseKeys| {
            fs::write(dir.path().join(name), bytes).unwrap();
            Weights::read(&dir.path().join(name), keys).unwrap_err()
        };
        let none = ReviseKeys::default();
        assert!(read("a.safetensors", b"short", &none).contains("header"));
        assert!(read("a.onnx", b"", &none).contains("unknown format"));
        if cfg!(feature = "candle") {
            assert!(read("a.pth", b"\x80\x02", &none).contains("save its `state_dict()` alone"));
        }
        let path = dir.path().join("b.safetensors");
        save(&path, &[("x.a", &[1], &[1.0]), ("y.a", &[1], &[1.0])]);
        let why = Weights::read(&path, &revise(&[("^[xy]", "z")]).unwrap()).unwrap_err();
        assert_eq!(why, "revise_keys renames both `x.a` and `y.a` to `z.a`");
        assert!(revise(&[("(?!x)", "")]).unwrap_err().contains("look-around"));
    }
}
