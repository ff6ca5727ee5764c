//! `TokenizedText`: the tokens of text files, in a file that is made once.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{
    AddedToken, DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper,
    Tokenizer, TokenizerImpl,
};

use super::{TokenType, TokenWindows};
use crate::stream::{FileState, Records, Source, TextFiles};
use crate::{ArrayData, BoxError, Error, Result};

/// The tokenizer of a [`TokenizedText`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenizerSource {
    /// A byte-level BPE that is trained on the text, as GPT-2's. Its end token is `<|endoftext|>`,
    /// the token 0.
    Train {
        /// Number of tokens, 257 or more; a short text gives fewer.
        vocab_size: usize,
    },
    /// A file `tokenizer.json`.
    File {
        /// Path of the file.
        path: PathBuf,
        /// The token after the end of a text, such as `</s>` or `<|end_of_text|>`.
        end: String,
    },
}

/// Text files as one file of tokens, and their tokenizer. Each file's tokens are followed by the
/// end token.
///
/// A directory keeps the tokens (`tokens.bin`), the tokenizer (`tokenizer.json`) and a description
/// of what they were made of (`tokens.json`). They are made once, by one process: others that ask
/// for them at the same time wait for it. They are made again if the text files (names, sizes,
/// times of modification) or the tokenizer change, or if they were not completed.
///
/// A text is encoded in pieces of some 256 KiB, which end with a line; a byte-level tokenizer gives
/// the same tokens as for a whole text. Lines end with `\n`, also `\r\n` and the last one. Special
/// tokens that are added by the tokenizer's template (`<s>`) are left out; those that are spelled
/// out in a text (`<|endoftext|>`) are recognized.
///
/// ```
/// use train_data::tokens::{TokenizedText, TokenizerSource};
/// use train_data::{Array, Dataset, Draw};
/// # let directory = tempfile::tempdir()?;
/// # let directory = directory.path();
///
/// std::fs::write(directory.join("a.txt"), "to be or not to be\n".repeat(9))?;
/// let texts = [format!("{}/*.txt", directory.display())];
/// let source = TokenizerSource::Train { vocab_size: 270 };
/// let text = TokenizedText::prepare(&texts, &source, directory.join("tokens"))?;
/// let (windows, unseen) = text.windows(8)?.split_last(1)?;
/// let first = windows.batch(&[Draw::from(0)])?;
/// assert_eq!(first.get("labels")?.shape(), [1, 8]);
/// assert_eq!(text.tokenizer().decode(&text.encode("to be")?, false)?, "to be");
/// # Ok::<(), train_data::BoxError>(())
/// ```
#[derive(Debug)]
pub struct TokenizedText {
    tokenizer: Tokenizer,
    end: u32,
    path: PathBuf,
    /// Opened under the lock: another call may replace it by that of another tokenizer.
    file: File,
    token_type: TokenType,
}

impl TokenizedText {
    /// Opens the tokens of the text files that match the patterns, as those of
    /// [`TextFiles`]: `texts/**/*.txt` are the files at any depth. Makes them first if they are not
    /// there. Blocks while another process makes them in the same directory.
    ///
    /// # Errors
    ///
    /// A pattern without a file; a file that is not UTF-8; a tokenizer that cannot be read, or
    /// without the end token; a vocabulary of fewer than 257 tokens; a directory that cannot be
    /// written to or locked.
    pub fn prepare(
        patterns: impl IntoIterator<Item: AsRef<str>>,
        source: &TokenizerSource,
        directory: impl AsRef<Path>,
    ) -> Result<Self, BoxError> {
        let (texts, directory) = (TextFiles::new(patterns)?, directory.as_ref());
        let at = |why: io::Error| format!("{}: {why}", directory.display());
        fs::create_dir_all(directory).map_err(at)?;
        // Dropped with the file, also when the process is killed.
        let lock = File::create(directory.join("tokens.lock")).map_err(at)?;
        lock.lock().map_err(at)?;
        let sources = Sources { files: texts.states(), tokenizer: state(source)? };
        if let Some(ready) = Self::open(directory, &sources) {
            return Ok(ready);
        }
        make(&texts, source, sources.clone(), directory)?;
        Self::open(directory, &sources).ok_or_else(|| {
            format!("{}: tokens were changed while made", directory.display()).into()
        })
    }

    /// Opens the files if they are complete, and made of these sources.
    fn open(directory: &Path, sources: &Sources) -> Option<Self> {
        let text = fs::read(directory.join(DESCRIPTION)).ok()?;
        let made: Description = serde_json::from_slice(&text).ok()?;
        let path = directory.join(TOKENS);
        let token_type = token_type(made.vocab_size);
        let bytes = made.tokens.checked_mul(token_type.bytes() as u64)?;
        let file = File::open(&path).ok()?;
        if made.sources != *sources || file.metadata().ok()?.len() != bytes {
            return None;
        }
        let tokenizer = Tokenizer::from_file(directory.join(TOKENIZER)).ok()?;
        (vocab_size(&tokenizer) == made.vocab_size).then_some(())?;
        Some(Self { tokenizer, end: made.end, path, file, token_type })
    }

    /// Windows of `length` tokens of all files, and their next tokens.
    ///
    /// # Errors
    ///
    /// Those of [`TokenWindows::open`].
    pub fn windows(&self, length: usize) -> Result<TokenWindows> {
        let opened = (self.file.try_clone(), self.path.clone());
        TokenWindows::of_files([opened], self.token_type, length)
    }

    /// The tokenizer.
    #[must_use]
    pub const fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The token after each file.
    #[must_use]
    pub const fn end(&self) -> u32 {
        self.end
    }

    /// Number of tokens: one more than the greatest token.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        vocab_size(&self.tokenizer)
    }

    /// The tokens of a text, without special tokens around it.
    ///
    /// # Errors
    ///
    /// Those of the tokenizer.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, BoxError> {
        Ok(self.tokenizer.encode_fast(text, false)?.get_ids().to_vec())
    }
}

const TOKENS: &str = "tokens.bin";
const TOKENIZER: &str = "tokenizer.json";
const DESCRIPTION: &str = "tokens.json";
const END: &str = "<|endoftext|>";

/// The content of `tokens.json`.
#[derive(Serialize, Deserialize)]
struct Description {
    sources: Sources,
    /// Number of tokens in the file.
    tokens: u64,
    vocab_size: usize,
    end: u32,
}

/// The input of the tokens; other ones are made anew.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
struct Sources {
    files: Vec<FileState>,
    tokenizer: TokenizerState,
}

#[derive(Clone, PartialEq, Serialize, Deserialize)]
enum TokenizerState {
    Trained { vocab_size: usize },
    File { checksum: u64, end: String },
}

fn state(source: &TokenizerSource) -> Result<TokenizerState, BoxError> {
    Ok(match source {
        TokenizerSource::Train { vocab_size } => {
            let vocab_size = *vocab_size;
            if vocab_size <= 256 {
                let text = "has 256 bytes and an end token: at least 257 tokens";
                return Err(Error::Options(format!(
                    "a byte-level tokenizer {text}, got {vocab_size}"
                ))
                .into());
            }
            TokenizerState::Trained { vocab_size }
        }
        TokenizerSource::File { path, end } => {
            let bytes = fs::read(path)
                .map_err(|why| format!("cannot read the tokenizer {}: {why}", path.display()))?;
            TokenizerState::File { checksum: crate::stream::checksum(&bytes), end: end.clone() }
        }
    })
}

/// Makes the three files, the description last.
fn make(
    texts: &TextFiles,
    source: &TokenizerSource,
    sources: Sources,
    directory: &Path,
) -> Result<(), BoxError> {
    let description = directory.join(DESCRIPTION);
    // An old one must not describe new tokens if this process is killed.
    match fs::remove_file(&description) {
        Err(why) if why.kind() != io::ErrorKind::NotFound => return Err(why.into()),
        _ => {}
    }
    let tokenizer = match source {
        TokenizerSource::Train { vocab_size } => train(texts, *vocab_size)?,
        TokenizerSource::File { path, .. } => load(path)?,
    };
    let end = match source {
        TokenizerSource::Train { .. } => END,
        TokenizerSource::File { end, .. } => end,
    };
    let end = tokenizer.token_to_id(end).ok_or_else(|| {
        Error::Options(format!("the tokenizer has no token `{end}` for the end of a text"))
    })?;
    replace(&directory.join(TOKENIZER), |file| {
        file.write_all(tokenizer.to_string(false)?.as_bytes())?;
        Ok(())
    })?;
    let vocab_size = vocab_size(&tokenizer);
    let mut tokens = 0;
    replace(&directory.join(TOKENS), |file| {
        tokens = encode(texts, &tokenizer, (end, token_type(vocab_size)), file)?;
        Ok(())
    })?;
    let made = Description { sources, tokens, vocab_size, end };
    replace(&description, |file| Ok(serde_json::to_writer(file, &made)?))
}

/// Replaces a file in one step by what `write` writes.
fn replace(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> Result<(), BoxError>,
) -> Result<(), BoxError> {
    let new = path.with_extension("new");
    let result = (|| {
        let mut file = BufWriter::new(File::create(&new)?);
        write(&mut file)?;
        file.into_inner()?.sync_all()?;
        fs::rename(&new, path)?;
        Ok(())
    })();
    result.map_err(|why: BoxError| format!("cannot make {}: {why}", path.display()).into())
}

/// Loads a tokenizer without the truncation and the padding that may be set in it: text would be
/// lost.
fn load(path: &Path) -> Result<Tokenizer, BoxError> {
    let mut tokenizer = Tokenizer::from_file(path)
        .map_err(|why| format!("cannot read the tokenizer {}: {why}", path.display()))?;
    tokenizer.with_padding(None);
    tokenizer.with_truncation(None)?;
    Ok(tokenizer)
}

fn train(texts: &TextFiles, vocab_size: usize) -> Result<Tokenizer, BoxError> {
    type Bpe = TokenizerImpl<
        BPE,
        NormalizerWrapper,
        PreTokenizerWrapper,
        PostProcessorWrapper,
        DecoderWrapper,
    >;
    let bytes = ByteLevel::default().add_prefix_space(false);
    let mut tokenizer = Bpe::new(BPE::default());
    tokenizer.with_pre_tokenizer(Some(bytes)).with_decoder(Some(bytes));
    let mut trainer = BpeTrainer::builder()
        .vocab_size(vocab_size)
        .show_progress(false)
        .special_tokens(vec![AddedToken::from(END, true)])
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .build();
    let mut failure = None;
    let pieces = (0..texts.shards().len()).flat_map(|shard| Pieces::new(texts, shard));
    let pieces = pieces.map_while(|piece| piece.map_err(|why| failure = Some(why)).ok());
    tokenizer.train(&mut trainer, pieces)?;
    match failure {
        Some(why) => Err(why),
        None => Ok(tokenizer.into()),
    }
}

/// Writes the tokens of all files, and returns their number.
fn encode(
    texts: &TextFiles,
    tokenizer: &Tokenizer,
    (end, token_type): (u32, TokenType),
    file: &mut impl Write,
) -> Result<u64, BoxError> {
    let mut count = 0;
    let mut write = |tokens: &[u32]| -> io::Result<()> {
        count += tokens.len() as u64;
        tokens.iter().try_for_each(|token| match token_type {
            TokenType::U16 => file.write_all(&(*token as u16).to_le_bytes()),
            TokenType::U32 => file.write_all(&token.to_le_bytes()),
        })
    };
    for shard in 0..texts.shards().len() {
        let mut pieces = Pieces::new(texts, shard);
        loop {
            let some = pieces.by_ref().take(PIECES).collect::<Result<Vec<_>, _>>()?;
            if some.is_empty() {
                break;
            }
            for encoding in tokenizer.encode_batch_fast(some, false)? {
                write(encoding.get_ids())?;
            }
        }
        write(&[end])?;
    }
    Ok(count)
}

/// The text of a file in pieces of whole lines.
struct Pieces<'a> {
    texts: &'a TextFiles,
    shard: usize,
    records: Option<Box<dyn Records>>,
    /// The lines of the next piece so far.
    piece: String,
    is_done: bool,
}

impl<'a> Pieces<'a> {
    const fn new(texts: &'a TextFiles, shard: usize) -> Self {
        Self { texts, shard, records: None, piece: String::new(), is_done: false }
    }

    /// Returns the next line, without its end.
    fn line(&mut self) -> Result<Option<String>, BoxError> {
        let records = match &mut self.records {
            Some(records) => records,
            None => self.records.insert(self.texts.open(self.shard, 0)?),
        };
        let Some(mut line) = records.next()? else { return Ok(None) };
        match line.take("text")?.into_data() {
            ArrayData::U8(bytes) => Ok(Some(String::from_utf8(bytes)?)),
            other => Err(format!("a line of {}", other.type_name()).into()),
        }
    }
}

impl Iterator for Pieces<'_> {
    type Item = Result<String, BoxError>;

    fn next(&mut self) -> Option<Self::Item> {
        while !self.is_done {
            let line = match self.line() {
                Ok(line) => line,
                Err(why) => {
                    self.is_done = true;
                    let name = &self.texts.shards()[self.shard].name;
                    return Some(Err(format!("{name}: {why}").into()));
                }
            };
            let Some(line) = line else {
                self.is_done = true;
                break;
            };
            // Byte-level tokenizers split the text between a line's end and the next line's first
            // letter, but the end may belong to white space before it.
            let text = self.piece.strip_suffix('\n').unwrap_or_default();
            let is_border = line.starts_with(|first: char| !first.is_whitespace())
                && !text.ends_with(char::is_whitespace);
            let full =
                (self.piece.len() >= PIECE && is_border).then(|| std::mem::take(&mut self.piece));
            self.piece += &line;
            self.piece.push('\n');
            if let Some(full) = full {
                return Some(Ok(full));
            }
        }
        (!self.piece.is_empty()).then(|| Ok(std::mem::take(&mut self.piece)))
    }
}

/// Bytes of a piece, or a few more.
const PIECE: usize = if cfg!(test) { 1 << 12 } else { 1 << 18 };
/// Number of pieces that are encoded at a time, on all cores.
const PIECES: usize = 16;

fn vocab_size(tokenizer: &Tokenizer) -> usize {
    tokenizer.get_vocab(true).into_values().max().map_or(0, |last| last as usize + 1)
}

const fn token_type(vocab_size: usize) -> TokenType {
    if vocab_size <= 1 << 16 { TokenType::U16 } else { TokenType::U32 }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;
    use crate::Dataset;

    const TRAIN: TokenizerSource = TokenizerSource::Train { vocab_size: 300 };

    struct Folder(tempfile::TempDir);

    impl Folder {
        fn new() -> Self {
            let folder = Self(tempfile::tempdir().unwrap());
            folder.write("b.txt", "the cat sat on the mat\n\n  and sat");
            folder.write("a.txt", "that cat\r\n");
            folder
        }

        fn write(&self, name: &str, text: impl AsRef<[u8]>) {
            fs::write(self.0.path().join(name), text).unwrap();
        }

        fn out(&self) -> PathBuf {
            self.0.path().join("out")
        }

        fn prepare(&self, source: &TokenizerSource) -> Result<TokenizedText, BoxError> {
            let pattern = format!("{}/*.txt", self.0.path().display());
            TokenizedText::prepare([pattern], source, self.out())
        }

        fn error(&self, source: &TokenizerSource) -> String {
            self.prepare(source).unwrap_err().to_string()
        }

        /// Time at which the tokens were made.
        fn made(&self) -> SystemTime {
            fs::metadata(self.out().join(TOKENS)).unwrap().modified().unwrap()
        }
    }

    fn tokens(text: &TokenizedText) -> Vec<u32> {
        let bytes = fs::read(&text.path).unwrap();
        assert_eq!(text.token_type, TokenType::U16);
        bytes.as_chunks().0.iter().map(|b| u16::from_le_bytes(*b).into()).collect()
    }

    #[test]
    fn files_follow_each_other_with_end_tokens() {
        let folder = Folder::new();
        let text = folder.prepare(&TRAIN).unwrap();
        let all = tokens(&text);
        let decoded = text.tokenizer().decode(&all, false).unwrap();
        let end = "<|endoftext|>";
        assert_eq!(decoded, format!("that cat\n{end}the cat sat on the mat\n\n  and sat\n{end}"));
        assert_eq!((text.end(), *all.last().unwrap()), (0, 0));
        // Pairs were merged, not more than there are.
        assert!(text.vocab_size() > 257 && text.vocab_size() <= 300, "{}", text.vocab_size());
        assert!(all.len() < 40, "{}", all.len());
        assert_eq!(text.windows(4).unwrap().len(), (all.len() - 1) / 4);
        assert!(text.windows(40).is_err());
    }

    #[test]
    fn tokens_are_made_again_if_their_sources_change() {
        let folder = Folder::new();
        let first = tokens(&folder.prepare(&TRAIN).unwrap());
        let made = folder.made();
        assert_eq!(tokens(&folder.prepare(&TRAIN).unwrap()), first);
        assert_eq!(folder.made(), made);

        // Of the same size.
        folder.write("a.txt", "that cap\r\n");
        let other = tokens(&folder.prepare(&TRAIN).unwrap());
        assert_ne!(other, first);
        folder.write("c.txt", "");
        assert_eq!(tokens(&folder.prepare(&TRAIN).unwrap()).len(), other.len() + 1);
        let smaller = folder.prepare(&TokenizerSource::Train { vocab_size: 257 }).unwrap();
        assert_eq!(smaller.vocab_size(), 257);
        // Also after a kill while the files were written.
        let expected = tokens(&smaller);
        for (name, content) in [(TOKENS, &b"12"[..]), (TOKENIZER, b"{"), (DESCRIPTION, b"{")] {
            fs::write(folder.out().join(name), content).unwrap();
            let again = folder.prepare(&TokenizerSource::Train { vocab_size: 257 }).unwrap();
            assert_eq!(tokens(&again), expected, "{name}");
        }
    }

    #[test]
    fn windows_are_those_of_the_tokenizer_also_if_another_one_replaces_the_file() {
        let folder = Folder::new();
        let first = folder.prepare(&TRAIN).unwrap();
        let before = tokens(&first);
        let other = folder.prepare(&TokenizerSource::Train { vocab_size: 258 }).unwrap();
        assert_ne!(tokens(&other), before);
        let windows = first.windows(4).unwrap();
        let batch = windows.batch(&[crate::Draw::from(0)]).unwrap();
        let ArrayData::I64(ids) = batch.get("input_ids").unwrap().data() else { panic!() };
        assert!(ids.iter().zip(&before).all(|(id, token)| *id == i64::from(*token)));
    }

    #[test]
    fn tokens_are_made_once_if_several_ask_at_the_same_time() {
        let folder = Folder::new();
        folder.write("c.txt", "a text of some length\n".repeat(500));
        let prepare = || {
            let text = folder.prepare(&TRAIN).unwrap();
            (tokens(&text), folder.made())
        };
        let all = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(prepare)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        assert!(all.iter().all(|one| *one == all[0]));
    }

    #[test]
    fn pieces_have_the_tokens_of_the_whole_text() {
        let folder = Folder::new();
        // Lines that begin with a letter, white space, and none at all.
        let lines = (0..2000).map(|i| match i % 5 {
            0 => String::new(),
            1 => format!("  indented {i}"),
            2 => "\ttab ".to_owned(),
            _ => format!("line {} of the text", i % 7),
        });
        let whole = lines.collect::<Vec<_>>().join("\n");
        assert!(whole.len() > 2 * PIECE);
        folder.write("a.txt", &whole);
        let texts = TextFiles::new([folder.0.path().join("a.txt").to_str().unwrap()]).unwrap();
        let pieces: Vec<_> = Pieces::new(&texts, 0).map(Result::unwrap).collect();
        assert!(pieces.len() > 2, "{}", pieces.len());
        assert_eq!(pieces.concat(), format!("{whole}\n"));
        let text = folder.prepare(&TRAIN).unwrap();
        let expected = text.encode(&format!("{whole}\n")).unwrap();
        assert_eq!(tokens(&text)[..expected.len()], expected);
    }

    #[test]
    fn a_tokenizer_can_be_a_file() {
        let folder = Folder::new();
        let trained = folder.prepare(&TRAIN).unwrap();
        let expected = tokens(&trained);
        let path = folder.0.path().join("tokenizer.json");
        let mut tokenizer = trained.tokenizer().clone();
        // Settings that would lose text.
        let truncation = tokenizers::TruncationParams { max_length: 2, ..Default::default() };
        tokenizer.with_truncation(Some(truncation)).unwrap();
        tokenizer.save(&path, false).unwrap();
        let source = |end: &str| TokenizerSource::File { path: path.clone(), end: end.to_owned() };
        let loaded = folder.prepare(&source("<|endoftext|>")).unwrap();
        assert_eq!(tokens(&loaded), expected);
        // Another end, and the tokenizer of the directory itself.
        let source = TokenizerSource::File { path: folder.out().join(TOKENIZER), end: "t".into() };
        let text = folder.prepare(&source).unwrap();
        assert_eq!(*tokens(&text).last().unwrap(), text.encode("t").unwrap()[0]);

        let message =
            folder.error(&TokenizerSource::File { path: path.clone(), end: "</s>".into() });
        assert!(message.contains("no token `</s>`"), "{message}");
        fs::write(&path, "{").unwrap();
        let message = folder.error(&TokenizerSource::File { path, end: "t".into() });
        assert!(message.contains("cannot read the tokenizer"), "{message}");
    }

    #[test]
    fn texts_that_cannot_be_read_are_errors() {
        let folder = Folder::new();
        let message = folder.error(&TokenizerSource::Train { vocab_size: 256 });
        assert!(message.contains("at least 257 tokens, got 256"), "{message}");
        folder.write("b.txt", b"good\n\xff\xfe\n");
        let message = folder.error(&TRAIN);
        assert!(message.contains("b.txt: the line is not text in UTF-8"), "{message}");
        let none = TokenizedText::prepare(["none/*.txt"], &TRAIN, folder.out()).unwrap_err();
        assert!(none.to_string().contains("none/*.txt: there is no such file"), "{none}");
        assert!(!folder.out().join(DESCRIPTION).exists());
    }
}
