//! Text: tokenize, truncate, pad, pack.
//!
//! Names are Hugging Face's: a text is the field `text`, bytes of UTF-8; its tokens are
//! `input_ids`, `i64`.

use super::{Transform, unfit};
use crate::{Array, ArrayData, Batch, BoxError, Result, Sample, SampleRng};

/// Computes the tokens `input_ids` of the field `text`, which is removed.
pub struct Tokenize {
    encode: Box<Encode>,
}

type Encode = dyn Fn(&str) -> Result<Vec<i64>, BoxError> + Send + Sync;

impl Tokenize {
    /// Uses any function from text to tokens.
    pub fn new(
        encode: impl Fn(&str) -> Result<Vec<i64>, BoxError> + Send + Sync + 'static,
    ) -> Self {
        Self { encode: Box::new(encode) }
    }

    /// Uses the tokenizer in a file `tokenizer.json`, without the truncation and the padding that
    /// may be set in it: see [`with`](Self::with). Needs the feature `tokenizers`.
    ///
    /// # Errors
    ///
    /// If the file cannot be read or parsed.
    #[cfg(feature = "tokenizers")]
    pub fn from_file(path: impl AsRef<std::path::Path>) -> Result<Self, BoxError> {
        let path = path.as_ref();
        let tokenizer = tokenizers::Tokenizer::from_file(path)
            .map_err(|why| format!("cannot read the tokenizer {}: {why}", path.display()))?;
        Ok(Self::with(tokenizer))
    }

    /// Uses a tokenizer of the crate `tokenizers`; it determines the special tokens that are added.
    /// Its truncation and padding are switched off, as transformers does in each call that does not
    /// ask for them: text would be lost without an error, and padding be trained on as text.
    /// [`TruncateTokens`] and [`PadTokens`] do either. Needs the feature `tokenizers`.
    #[cfg(feature = "tokenizers")]
    #[must_use]
    pub fn with(mut tokenizer: tokenizers::Tokenizer) -> Self {
        tokenizer.with_padding(None);
        // Only the parameters of a truncation can be an error.
        let _ = tokenizer.with_truncation(None);
        Self::new(move |text| {
            let encoding = tokenizer.encode_fast(text, true)?;
            Ok(encoding.get_ids().iter().copied().map(i64::from).collect())
        })
    }
}

impl Transform for Tokenize {
    fn apply(&self, mut sample: Sample, _: &mut SampleRng) -> Result<Sample, BoxError> {
        let ArrayData::U8(text) = sample.take("text")?.into_data() else {
            return Err(unfit("the field `text` must be bytes of UTF-8").into());
        };
        let text =
            std::str::from_utf8(&text).map_err(|why| format!("the text is not UTF-8: {why}"))?;
        let tokens = (self.encode)(text)?;
        sample.set("input_ids", Array::new([tokens.len()], tokens)?);
        Ok(sample)
    }
}

impl std::fmt::Debug for Tokenize {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenize").finish_non_exhaustive()
    }
}

/// Drops the tokens from this index on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TruncateTokens(pub usize);

impl Transform for TruncateTokens {
    fn apply(&self, mut sample: Sample, _: &mut SampleRng) -> Result<Sample, BoxError> {
        let mut tokens = tokens(&mut sample)?;
        tokens.truncate(self.0);
        sample.set("input_ids", Array::new([tokens.len()], tokens)?);
        Ok(sample)
    }
}

/// Pads tokens to a length, and adds the field `attention_mask`: 1 for original tokens, 0 for
/// padding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PadTokens {
    /// Length after padding; a longer text is an error.
    pub length: usize,
    /// Padding token.
    pub token: i64,
}

impl Transform for PadTokens {
    fn apply(&self, mut sample: Sample, _: &mut SampleRng) -> Result<Sample, BoxError> {
        let mut tokens = tokens(&mut sample)?;
        let count = tokens.len();
        if count > self.length {
            let text =
                format!("{count} tokens cannot be padded to {}; truncate before", self.length);
            return Err(unfit(text).into());
        }
        tokens.resize(self.length, self.token);
        let mut mask = vec![1_i64; count];
        mask.resize(self.length, 0);
        sample.set("input_ids", Array::new([self.length], tokens)?);
        sample.set("attention_mask", Array::new([self.length], mask)?);
        Ok(sample)
    }
}

/// Packs the texts of a batch into rows of one length without gaps, each text followed by the token
/// `end`: the fields `input_ids` and `labels`, `[rows, length]`. A label is the next token; it is
/// [`IGNORED`] if there is none, and after the last text in the last row, which is filled up with
/// `end`. A text may begin in one row and end in the next.
///
/// The number of rows depends on the texts, so it may differ between ranks; gradients are averaged
/// over ranks with equal weights nonetheless.
///
/// The result depends only on the batch's texts, so that a run resumes exactly. Use it as
/// `collate_fn` in the sense of `torch.utils.data`.
///
/// # Errors
///
/// [`Error::Input`](crate::Error::Input) for a sample without `input_ids`; for a length of 0; for
/// samples without any token, whose labels would all be ignored and the mean loss NaN.
pub fn pack(samples: Vec<Sample>, length: usize, end: i64) -> Result<Batch> {
    if length == 0 {
        return Err(unfit("rows must be at least 1 token long"));
    }
    let given = samples.len();
    let mut all = Vec::new();
    for mut sample in samples {
        all.extend(tokens(&mut sample)?);
        all.push(end);
    }
    if given > 0 && all.len() < 2 {
        return Err(unfit(
            "the batch has no tokens; leave out empty texts, or set a larger `batch_size`",
        ));
    }
    // The last token has no label, and no other row could contain it.
    let rows = all.len().saturating_sub(1).div_ceil(length);
    let mut labels = all.get(1..).unwrap_or_default().to_vec();
    labels.resize(rows * length, IGNORED);
    all.resize(rows * length, end);
    Ok(Batch::new()
        .with("input_ids", Array::new([rows, length], all)?)
        .with("labels", Array::new([rows, length], labels)?))
}

/// Label of a token that the loss ignores: PyTorch's `ignore_index`.
#[doc(alias = "ignore_index")]
pub const IGNORED: i64 = -100;

/// Takes the tokens of a sample.
fn tokens(sample: &mut Sample) -> Result<Vec<i64>> {
    match sample.take("input_ids")?.into_data() {
        ArrayData::I64(tokens) => Ok(tokens),
        other => Err(unfit(format!("`input_ids` must be of i64, not {}", other.type_name()))),
    }
}

#[cfg(all(test, feature = "tokenizers"))]
mod tests {
    use std::str::FromStr;

    use super::*;
    use crate::Draw;

    const FILE: &str = r#"{"version": "1.0", "added_tokens": [],
        "truncation": {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": null,
                    "pad_id": 0, "pad_type_id": 0, "pad_token": "?"},
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": {"?": 0, "a": 1, "b": 2}, "unk_token": "?"}}"#;

    #[test]
    fn truncation_and_padding_of_a_tokenizer_are_switched_off() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokenizer.json");
        std::fs::write(&path, FILE).unwrap();
        let read = Tokenize::from_file(&path).unwrap();
        let given = Tokenize::with(tokenizers::Tokenizer::from_str(FILE).unwrap());
        for tokenize in [read, given] {
            for (text, ids) in [("a b", &[1, 2_i64][..]), ("b b b b b b a", &[2, 2, 2, 2, 2, 2, 1])]
            {
                let text = Array::new([text.len()], text.as_bytes().to_vec()).unwrap();
                let sample = Sample::new().with("text", text);
                let made = tokenize.apply(sample, &mut Draw::from(0).random()).unwrap();
                assert_eq!(*made.get("input_ids").unwrap().data(), ids.to_vec().into());
            }
        }
    }
}
