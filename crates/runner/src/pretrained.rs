//! Reads pretrained weights: safetensors files, and files written by PyTorch's `torch.save`.
//!
//! [`Weights::read`] reads a file, [`ReviseKeys`] renames its tensors, [`Weights::transpose`]
//! transposes some, [`Weights::fit`] compares them with a model's: the [`Fit`] maps the model's
//! tensors to the file's, and its [`Report`] lists the names of missing, unexpected and mismatched
//! tensors. This module depends on names, shapes and bytes only, not on a run or an engine.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::fs;
use std::ops::Range;
use std::path::Path;

use regex::Regex;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::Value;

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
}

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq)]
struct Saved {
    name: String,
    shape: Vec<usize>,
    dtype: Dtype,
    buffer: usize,
    range: Range<usize>,
}

impl Weights {
    /// Reads a `.safetensors` file, a `.safetensors.index.json` with the files it lists, or
    /// PyTorch's `.pth`, `.pt` or `.bin`, in which the state dict may be under `state_dict` or
    /// `model`.
    pub(crate) fn read(path: &Path, revise: &ReviseKeys) -> Result<Self> {
        let mut weights = Self::default();
        match kind(path) {
            Some(Kind::Safetensors) => weights.add_safetensors(path)?,
            Some(Kind::Index) => weights.add_index(path)?,
            Some(Kind::PyTorch) => weights.add_pytorch(path)?,
            None => return Err(format!("unknown format: supported are {FORMATS}")),
        }
        if weights.tensors.is_empty() {
            return Err(
                "contains no tensors at the top level or under `state_dict` or `model`: save a state dict"
                    .to_owned(),
            );
        }
        let mut seen = HashMap::new();
        for tensor in &mut weights.tensors {
            let revised = revise.apply(&tensor.name);
            let old = std::mem::replace(&mut tensor.name, revised.clone());
            if let Some(other) = seen.insert(revised.clone(), old.clone()) {
                return Err(format!(
                    "revise_keys renames both `{other}` and `{old}` to `{revised}`"
                ));
            }
        }
        Ok(weights)
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
            let Saved { name, shape, dtype, .. } = self.tensors[at].clone();
            let [rows, columns] = shape[..] else {
                return Err(format!("load_from.transpose: `{name}` is {shape:?}, not a matrix"));
            };
            let bytes = self.bytes(at);
            let size = bytes.len() / (rows * columns).max(1);
            let element = |at: usize| &bytes[at * size..][..size];
            let column = |column| (0..rows).flat_map(move |row| element(row * columns + column));
            let transposed: Vec<u8> = (0..columns).flat_map(column).copied().collect();
            self.tensors[at] = Saved {
                name,
                shape: vec![columns, rows],
                dtype,
                buffer: self.buffers.len(),
                range: 0..transposed.len(),
            };
            self.buffers.push(transposed);
        }
        Ok(())
    }

    /// Returns type, shape and elements of a tensor.
    pub(crate) fn view(&self, index: usize) -> Result<TensorView<'_>> {
        let Saved { name, shape, dtype, buffer, range } = &self.tensors[index];
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
        let files: BTreeSet<&str> = map.values().filter_map(Value::as_str).collect();
        for file in files {
            let path = path.with_file_name(file);
            self.add_safetensors(&path).map_err(|why| format!("{}: {why}", path.display()))?;
        }
        Ok(())
    }

    /// Adds a tensor converted to `f32`, because models have no `f64`.
    fn add_f64(&mut self, name: String, shape: Vec<usize>, bytes: &[u8]) {
        let narrow = |b: &[u8; 8]| (f64::from_le_bytes(*b) as f32).to_le_bytes();
        self.add(name, shape, Dtype::F32, bytes.as_chunks().0.iter().flat_map(narrow).collect());
    }

    fn add(&mut self, name: String, shape: Vec<usize>, dtype: Dtype, bytes: Vec<u8>) {
        let (buffer, range) = (self.buffers.len(), 0..bytes.len());
        self.buffers.push(bytes);
        self.tensors.push(Saved { name, shape, dtype, buffer, range });
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
        let names: BTreeSet<&String> = file.tensor_infos().keys().collect();
        for name in names {
            let Some(tensor) = file.get(name).map_err(|e| format!("`{name}`: {e}"))? else {
                continue;
            };
            self.add_candle(name, &tensor).map_err(|e| format!("`{name}`: {e}"))?;
        }
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
            DType::F32 | DType::F64 => {
                let values = flat.to_dtype(DType::F32)?.to_vec1::<f32>()?;
                (Dtype::F32, values.iter().flat_map(|x| x.to_le_bytes()).collect())
            }
            // Models have no such types; only the name is used.
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
        let mut report = Report::default();
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
}

/// Mapping of a model's tensors to those of a file.
#[derive(Debug)]
pub(crate) struct Fit {
    /// For each tensor of the model, the index of the file's tensor.
    pub(crate) sources: Vec<Option<usize>>,
    pub(crate) report: Report,
}

/// Differences between a file's tensors and a model's.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Report {
    /// Number of the model's tensors found in the file.
    pub(crate) used: usize,
    /// Names of the model's tensors missing in the file.
    pub(crate) missing: Vec<String>,
    /// Names of the file's tensors that the model does not have.
    pub(crate) left_over: Vec<String>,
    /// Names, with shapes or types, of tensors that do not match.
    pub(crate) mismatched: Vec<String>,
}

impl Report {
    /// Returns whether every tensor has a counterpart.
    pub(crate) fn is_exact(&self) -> bool {
        self.missing.is_empty() && self.left_over.is_empty() && self.mismatched.is_empty()
    }

    /// Suggests `revise_keys` if all names on one side share a prefix that the other side lacks.
    fn hint(&self) -> Option<String> {
        let prefix = |longer: &[String], shorter: &[String]| {
            let longest = longer.first()?;
            let ends = |short: &&String| longest.ends_with(&format!(".{short}"));
            let short = shorter.iter().filter(ends).max_by_key(|short| short.len())?;
            let prefix = longest[..longest.len() - short.len()].to_owned();
            longer.iter().all(|name| name.starts_with(&prefix)).then_some(prefix)
        };
        let (pattern, to) = match prefix(&self.left_over, &self.missing) {
            Some(prefix) => (format!("^{}", regex::escape(&prefix)), String::new()),
            None => ("^".to_owned(), prefix(&self.missing, &self.left_over)?),
        };
        Some(format!("; try revise_keys = [['{pattern}', '{to}']]"))
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let quoted = |names: &[String]| names.iter().map(|name| format!("`{name}`")).collect();
        let parts: [(&str, Vec<String>); 3] = [
            ("missing", quoted(&self.missing)),
            ("unexpected", quoted(&self.left_over)),
            ("mismatched", self.mismatched.clone()),
        ];
        let mut separator = "";
        for (what, names) in parts.into_iter().filter(|(_, names)| !names.is_empty()) {
            let shown = if names.len() > LISTED { LISTED - 2 } else { names.len() };
            write!(f, "{separator}{what}: {}", names[..shown].join(", "))?;
            if shown < names.len() {
                write!(f, " and {} more", names.len() - shown)?;
            }
            separator = "; ";
        }
        f.write_str(&self.hint().unwrap_or_default())
    }
}

/// Maximum number of names listed.
const LISTED: usize = 12;

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
