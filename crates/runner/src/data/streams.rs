//! Streams that a configuration can name as the `dataset` of a loader.
//!
//! | `type` | one record |
//! |---|---|
//! | `TextStream` | a line of a text file, as bytes in the field `text` |
//! | `JsonStream` | a line with a JSON object: one field per entry; `floats` names `f32` fields |
//! | `TarStream` | files of one base name in a tar archive, as in WebDataset: bytes by extension |
//! | `ParquetStream` | a row of a Parquet file: one field per column, or per name in `columns` |
//!
//! All take `files`, one or more names or patterns, and `shuffle_buffer = 0`, see
//! [`StreamOptions`]. A field in `floats` is `f32` even if its number is written as `1`. Names of
//! text files and archives may end with `.gz`, those of archives with `.tgz`.
//! `fields = { inputs = "jpg;png", labels = "cls" }` selects and renames fields, see [`select`].
//! `ParquetStream` needs the feature `parquet`.

use train_data::stream::{select, to_floats};
use train_data::{Stream, StreamOptions};

use crate::Result;
use crate::config::Section;
use crate::registry::Registry;

/// Streams that a configuration can name in `[train_dataloader.dataset]`: built-in ones, and those
/// that the program registers.
pub static STREAMS: Registry<StreamFactory> = Registry::with(
    "stream",
    &[
        ("JsonStream", read_json),
        ("ParquetStream", read_parquet),
        ("TarStream", |section| read(section, Stream::tar)),
        ("TextStream", |section| read(section, Stream::text)),
    ],
);

/// Creates the stream of a rank; the options name the rank. The call may open files; it is made
/// only after the whole configuration was checked. It may set `shuffle_buffer` of the options.
pub type StreamFactory = Box<dyn FnOnce(StreamOptions) -> Result<Stream> + Send>;

fn read(
    section: &mut Section,
    make: impl FnOnce(Vec<String>, StreamOptions) -> train_data::Result<Stream> + Send + 'static,
) -> Result<StreamFactory> {
    if !section.has("files") {
        section.attempt(|section| section.required::<Vec<String>>("files"))?;
    }
    let files: Vec<String> = section.one_or_more("files")?;
    let shuffle_buffer = section.or("shuffle_buffer", 0)?;
    let fields = section.optional_section("fields")?;
    let fields = fields.map(|mut fields| fields.named_values::<String>()).transpose()?;
    Ok(Box::new(move |options| {
        let stream = make(files, StreamOptions { shuffle_buffer, ..options })?;
        Ok(match fields {
            Some(fields) => stream.map(move |sample, _| select(sample, &fields)),
            None => stream,
        })
    }))
}

fn read_json(section: &mut Section) -> Result<StreamFactory> {
    let floats: Vec<String> = section.one_or_more("floats")?;
    read(section, move |files, options| {
        Ok(Stream::json(files, options)?.map(move |sample, _| to_floats(sample, &floats)))
    })
}

#[cfg(feature = "parquet")]
fn read_parquet(section: &mut Section) -> Result<StreamFactory> {
    use train_data::stream::ParquetFiles;

    let columns: Vec<String> = section.one_or_more("columns")?;
    read(section, move |files, options| {
        let files = ParquetFiles::new(files)?;
        let files = if columns.is_empty() { files } else { files.columns(columns) };
        Stream::new(files, options)
    })
}

#[cfg(not(feature = "parquet"))]
fn read_parquet(section: &mut Section) -> Result<StreamFactory> {
    Err(section.error("`ParquetStream` needs `runner` built with the feature `parquet`"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn build(text: &str) -> Result<StreamFactory> {
        STREAMS.build(Config::from_text("c.toml", text).unwrap().into_section())
    }

    #[test]
    fn streams_are_read_from_a_configuration() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.txt");
        std::fs::write(&path, "a line\n").unwrap();
        for kind in ["TextStream", "JsonStream", "TarStream"] {
            let text =
                format!("type = '{kind}'\nfiles = ['{}']\nshuffle_buffer = 7", path.display());
            let stream = build(&text).unwrap()(StreamOptions { seed: 3, ..Default::default() });
            let layout = stream.unwrap().layout();
            assert_eq!((layout.shuffle_buffer, layout.seed, layout.shards), (7, 3, 1));
        }
        std::fs::write(&path, "{\"x\": 1}\n{\"x\": 0.5}\n").unwrap();
        let floats = format!("type = 'JsonStream'\nfiles = '{}'\nfloats = 'x'", path.display());
        let stream = build(&floats).unwrap()(StreamOptions::default()).unwrap();
        let mut loader =
            train_data::StreamLoader::new(stream, 2, train_data::Workers::new(0)).unwrap();
        assert_eq!(loader.next_batch().unwrap().unwrap().get("x").unwrap().shape(), [2]);
        std::fs::write(&path, "a line\n").unwrap();
        let renamed = format!(
            "type = 'TextStream'\nfiles = '{}'\nfields = {{ line = 'b;text' }}",
            path.display()
        );
        let stream = build(&renamed).unwrap()(StreamOptions::default()).unwrap();
        let mut loader =
            train_data::StreamLoader::new(stream, 1, train_data::Workers::new(0)).unwrap();
        assert_eq!(loader.next_batch().unwrap().unwrap().get("line").unwrap().shape(), [1, 6]);
        let says = |text: &str| build(text).err().unwrap().to_string();
        assert!(says("type = 'TextStream'").contains("`files`"));
        assert!(
            says("type = 'TextStream'\nfiles = 'a'\nlines = 2").contains("unknown key `lines`")
        );
        let missing = build("type = 'TextStream'\nfiles = 'nowhere/*.txt'").unwrap();
        let error = missing(StreamOptions::default()).unwrap_err().to_string();
        assert!(error.contains("nowhere/*.txt: there is no such file"), "{error}");
    }

    #[cfg(not(feature = "parquet"))]
    #[test]
    fn missing_feature_is_named() {
        let error = build("type = 'ParquetStream'\nfiles = 'a'").err().unwrap().to_string();
        assert!(error.contains("needs `runner` built with the feature `parquet`"), "{error}");
    }
}
