//! `Report`: lists how a file's tensors differ from a model's, with advice.

use std::fmt;

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
    /// Number of the used tensors that were `f64`.
    pub(crate) doubles: usize,
    /// Names of the used tensors that contain NaN or an infinity.
    pub(crate) non_finite: Vec<String>,
    /// A missing matrix and the table of embeddings that it may be tied to in the file.
    pub(super) tied: Option<(String, String)>,
    /// Types of tensors that cannot be read.
    pub(super) unread: String,
}

impl Report {
    /// Returns whether every tensor has a counterpart.
    pub(crate) fn is_exact(&self) -> bool {
        self.missing.is_empty() && self.left_over.is_empty() && self.mismatched.is_empty()
    }

    /// Suggests `revise_keys` if names differ by a part that wrappers add, or if all names on one
    /// side share a prefix that the other side lacks.
    fn hint(&self) -> Option<String> {
        let wrapped = |part: &&&str| {
            let inner = |name: &String| {
                let plain = name.replacen(&format!(".{part}."), ".", usize::MAX);
                plain != *name && self.missing.contains(&plain)
            };
            self.left_over.iter().any(inner)
        };
        if let Some(part) = WRAPPERS.iter().find(wrapped) {
            return Some(format!("; try revise_keys = [['\\b{part}\\.', '']]"));
        }
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
        f.write_str(&self.hint().unwrap_or_default())?;
        if let Some((head, table)) = &self.tied {
            write!(
                f,
                "; `{head}` has the shape of `{table}`: if the two are tied in the file's model, tie them in this one \
                 (request one weight, `{table}`, for both layers), or save the file with both"
            )?;
        }
        if !self.missing.is_empty() && !self.unread.is_empty() {
            let types = &self.unread;
            write!(
                f,
                "; the file also has tensors of {types}, which cannot be read: save them as float"
            )?;
        }
        Ok(())
    }
}

/// Names that PyTorch's wrappers add inside of names: `torch.compile`, FSDP, activation
/// checkpointing, DDP.
const WRAPPERS: [&str; 4] =
    ["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module"];

/// Maximum number of names listed.
const LISTED: usize = 12;
