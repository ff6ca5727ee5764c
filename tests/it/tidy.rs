//! The house rules that a machine can check: the folders of ARCHITECTURE.md, the length of files
//! and functions, a first line that says what a file is, the width and the first words of comments,
//! the width of kernels and scripts.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Lines of a file before its tests.
const MAX_FILE: usize = 600;
/// Lines of a function: a screen.
const MAX_FUNCTION: usize = 70;

/// Columns of a comment: as many as rustfmt allows code.
const MAX_COMMENT: usize = 100;
/// Columns of code that no tool formats: kernels and scripts.
const MAX_CODE: usize = 120;
/// Sentences begin with their subject, not with one of these words.
const OPENINGS: &[&str] = &["What", "Whatever", "Where", "Wherever", "Who", "Whoever", "That"];

/// Files of the repository, from its root, ignored ones left out.
fn files() -> Vec<String> {
    let output = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard"])
        .current_dir(tests::root())
        .output()
        .expect("git lists the files");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let root = tests::root();
    let text = String::from_utf8(output.stdout).unwrap();
    let files: Vec<_> =
        text.lines().filter(|f| root.join(f).is_file()).map(str::to_owned).collect();
    assert!(files.len() > 50, "git lists only {} files", files.len());
    files
}

fn read(file: &str) -> String {
    std::fs::read_to_string(tests::root().join(file)).unwrap()
}

/// The folders that ARCHITECTURE.md names: the first word of each line in the block after
/// "Folders".
fn named() -> BTreeSet<String> {
    let text = read("ARCHITECTURE.md");
    let section = text.split("## Folders").nth(1).expect("there is a section `Folders`");
    let block = section.split("```").nth(1).expect("the folders are a code block");
    let words = block.lines().skip(1).filter_map(|line| line.split_whitespace().next());
    words.map(str::to_owned).collect()
}

#[test]
fn architecture_names_every_folder_and_no_other() {
    let named = named();
    for file in files() {
        let path = Path::new(&file);
        let is_source = file.ends_with(".rs") && path.starts_with("crates");
        let mut folders = path.ancestors().skip(1).map(|folder| folder.to_str().unwrap());
        let folder = folders.next().unwrap();
        // A crate's own files, examples and tests are where Cargo has them.
        let is_named = match path.strip_prefix("crates").map(|path| path.iter().nth(1)) {
            Ok(Some(part)) if part == "src" && is_source => named.contains(folder),
            Ok(_) => true,
            Err(_) => {
                folder.is_empty() || named.contains(folder) || folders.any(|f| named.contains(f))
            }
        };
        assert!(is_named, "ARCHITECTURE.md does not name the folder of {file}");
    }
    for name in &named {
        assert!(
            tests::root().join(name).is_dir(),
            "ARCHITECTURE.md names {name}, which is no folder"
        );
    }
}

#[test]
fn files_begin_with_a_word_and_end_in_sight() {
    for file in files().iter().filter(|f| f.ends_with(".rs")) {
        let text = read(file);
        assert!(text.starts_with("//! ") || text.starts_with("#![no_main]"), "{file} has no docs");
        let lines = text.lines().take_while(|l| *l != "#[cfg(test)]").count();
        assert!(lines <= MAX_FILE, "{file} has {lines} lines before its tests");
    }
}

#[test]
fn functions_fit_a_screen() {
    for file in files().iter().filter(|f| f.ends_with(".rs")) {
        let text = read(file);
        let mut open: Option<(usize, usize, &str)> = None;
        for (number, line) in text.lines().enumerate() {
            let indent = line.len() - line.trim_start().len();
            let starts = ["fn ", "pub fn ", "pub(crate) fn ", "pub(super) fn ", "unsafe fn "]
                .iter()
                .any(|s| line.trim_start().starts_with(s));
            if starts && open.is_none() && !line.trim_end().ends_with(';') {
                open = Some((number, indent, line.trim()));
            }
            // A declaration of several lines, without a body.
            if open.is_some_and(|(_, at, _)| indent == at) && line.trim_end().ends_with(';') {
                open = None;
            }
            if let Some((start, at, name)) = open
                && indent == at
                && line.trim_end() == format!("{}}}", " ".repeat(at))
            {
                let length = number - start + 1;
                assert!(length <= MAX_FUNCTION, "{file}: {length} lines: {name}");
                open = None;
            }
        }
    }
}

#[test]
fn comments_are_narrow_and_begin_with_their_subject() {
    let (mut wide, mut openings) = (Vec::new(), Vec::new());
    for file in files().iter().filter(|file| file.ends_with(".rs")) {
        for (number, line) in read(file).lines().enumerate() {
            let Some(text) = comment(line) else { continue };
            let place = || format!("{file}:{}: {}", number + 1, line.trim_start());
            // A row of a table cannot be broken.
            if line.chars().count() > MAX_COMMENT && !text.starts_with('|') {
                wide.push(place());
            }
            if text.split(". ").any(opens_oddly) {
                openings.push(place());
            }
        }
    }
    assert!(wide.is_empty(), "comments wider than {MAX_COMMENT}:\n{}", wide.join("\n"));
    assert!(openings.is_empty(), "sentences that begin oddly:\n{}", openings.join("\n"));
}

#[test]
fn kernels_and_scripts_are_narrow() {
    let mut wide = Vec::new();
    for file in files() {
        let Some(mark) = comment_mark(&file) else { continue };
        for (number, line) in read(&file).lines().enumerate() {
            let is_comment = line.trim_start().starts_with(mark);
            let most = if is_comment { MAX_COMMENT } else { MAX_CODE };
            if line.chars().count() > most || line.ends_with([' ', '\t']) {
                wide.push(format!("{file}:{}: {}", number + 1, line.trim_start()));
            }
        }
    }
    assert!(
        wide.is_empty(),
        "comments wider than {MAX_COMMENT}, code wider than {MAX_CODE}, or blanks at the end:\n{}",
        wide.join("\n")
    );
}

/// The first characters of a comment in a kernel, a header or a script; `None` in other files.
fn comment_mark(file: &str) -> Option<&'static str> {
    match Path::new(file).extension()?.to_str()? {
        "cu" | "h" => Some("//"),
        "py" | "sh" => Some("#"),
        _ => None,
    }
}

/// The text of a line that is a comment.
fn comment(line: &str) -> Option<&str> {
    let text = line.trim_start().strip_prefix("//")?;
    Some(text.trim_start_matches(['/', '!']).trim_start())
}

fn opens_oddly(sentence: &str) -> bool {
    OPENINGS.contains(&sentence.split(|c: char| !c.is_alphanumeric()).next().unwrap())
}

#[test]
fn comments_and_their_first_words_are_found() {
    let texts =
        ["/// What", "    //! Who", "// That: x", "let x = 1; // What", "\"//\""].map(comment);
    assert_eq!(texts, [Some("What"), Some("Who"), Some("That: x"), None, None]);
    assert!(opens_oddly("What pays") && opens_oddly("That's"));
    assert!(!opens_oddly("Whatsoever") && !opens_oddly("what pays") && !opens_oddly(""));
}

#[test]
fn no_file_is_empty_or_only_promises() {
    let promises = [["to", "do!("].concat(), ["unimple", "mented!("].concat()];
    for file in files() {
        let path: PathBuf = tests::root().join(&file);
        assert!(std::fs::metadata(&path).unwrap().len() > 0, "{file} is empty");
        if file.ends_with(".rs") {
            let text = read(&file);
            for promise in &promises {
                assert!(!text.contains(promise.as_str()), "{file} says {promise}");
            }
        }
    }
}

#[test]
fn no_two_source_files_are_equal() {
    let mut known: BTreeMap<Vec<u8>, String> = BTreeMap::new();
    // A package's licence is a link to the repository's.
    let is_own =
        |file: &String| file.starts_with("crates/") && !tests::root().join(file).is_symlink();
    for file in files().into_iter().filter(is_own) {
        let content = std::fs::read(tests::root().join(&file)).unwrap();
        if let Some(other) = known.insert(content, file.clone()) {
            panic!("{file} and {other} are equal: keep one");
        }
    }
}

#[test]
fn tests_that_lack_a_tool_are_ignored_by_the_harness() {
    let printed = ["\"ignored", ": "].concat();
    for file in files().iter().filter(|f| f.ends_with(".rs")) {
        assert!(
            !read(file).contains(&printed),
            "{file}: use `#[ignore = \"needs ...\"]`, and fail without it"
        );
    }
}
