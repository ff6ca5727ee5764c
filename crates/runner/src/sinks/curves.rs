//! Scalars of a run as curves over its iterations, read from its `scalars.json` files.
//!
//! A resumed run has several files, in directories named after local time, which may go back. So
//! they are joined in the order of their first iterations. Iterations that a later file repeats
//! replace the earlier ones, so a run is one curve. Every value, including those of validations, is
//! at an iteration: the step of its line or the last iteration logged before, whichever is greater.
//! So steps may count epochs or iterations.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use jsonc_parser::{JsonObject, JsonValue, ParseOptions, parse_to_value};

use crate::config::STRICT_JSON;
use crate::{Error, Result};

/// Points of one scalar: iteration and value.
pub(super) type Curve = Vec<(i64, f32)>;

/// Curves of one run.
#[derive(Debug, Default)]
pub(super) struct Run {
    /// Path that it was read from.
    pub(super) name: String,
    pub(super) curves: BTreeMap<String, Curve>,
    /// Whether a line has its iteration; otherwise the unit of steps is unknown.
    pub(super) has_iters: bool,
}

impl Run {
    /// Reads a `scalars.json`, or all in a work directory.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let mut run = Self { name: path.display().to_string(), ..Self::default() };
        let mut parts = Vec::new();
        for (age, file) in files(path)?.into_iter().enumerate() {
            let name = file.display();
            let text = std::fs::read_to_string(&file)
                .map_err(|source| Error::Io { what: format!("cannot read {name}"), source })?;
            let range = range(&text).map_err(|e| Error::data_of(name, e))?;
            // A file without training, such as of an evaluation, stays behind the one before it.
            let range = range.or_else(|| parts.last().map(|(start, ..): &Part| (*start, i64::MIN)));
            let (start, end) = range.unwrap_or((i64::MIN, i64::MIN));
            parts.push((start, age, end, text));
        }
        parts.sort_by_key(|(start, age, ..)| (*start, *age));
        for (index, (_, age, _, text)) in parts.iter().enumerate() {
            // Files that begin earlier, but were made later.
            let newer = parts[..index].iter().filter(|(_, other, ..)| other > age);
            run.append(text, newer.map(|part| part.2).max().unwrap_or(i64::MIN))?;
        }
        Ok(run)
    }

    /// Adds the lines of a file, which continues the run, except those up to the iteration
    /// `replaced`, which newer files repeat.
    pub(super) fn append(&mut self, text: &str, replaced: i64) -> Result<()> {
        let records = records(text)?;
        let start = records.iter().find_map(|record| record.iter);
        if let Some(start) = start.map(|start| start.max(replaced.saturating_add(1))) {
            self.curves.values_mut().for_each(|curve| curve.retain(|point| point.0 < start));
        }
        let resumed = self.has_iters;
        self.has_iters |= start.is_some();
        let mut iter = self.curves.values().filter_map(|curve| curve.last()).map(|p| p.0).max();
        for Record { step, iter: own, scalars } in records {
            if start.is_none() && resumed && step == 0 {
                // `runner val` in the directory of a training run is not part of it.
                continue;
            }
            iter = own.or(iter);
            let at = iter.map_or(step, |iter| iter.max(step));
            if at <= replaced {
                continue;
            }
            for (name, value) in scalars {
                let value = match value {
                    JsonValue::Null => f32::NAN,
                    JsonValue::Number(number) => number.parse().unwrap_or(f32::NAN),
                    _ => continue,
                };
                let value = if value.is_finite() { value } else { f32::NAN };
                self.curves.entry(name.into()).or_default().push((at, value));
            }
        }
        Ok(())
    }
}

/// First iteration, age (greater for a newer file), last iteration and text of a file.
type Part = (i64, usize, i64, String);

/// First and last training iteration of a file; `None` if it has none.
fn range(text: &str) -> Result<Option<(i64, i64)>> {
    let records = records(text)?;
    let mut iters = records.iter().filter_map(|record| record.iter);
    Ok(iters.next().map(|first| (first, iters.next_back().unwrap_or(first))))
}

/// Lists the files of a run, in the order of their names.
fn files(path: &Path) -> Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let direct = ["scalars.json", "vis_data/scalars.json"].map(|name| path.join(name));
    if let Some(file) = direct.into_iter().find(|file| file.is_file()) {
        return Ok(vec![file]);
    }
    let io = |source| Error::Io { what: format!("cannot read {}", path.display()), source };
    let entries = std::fs::read_dir(path).and_then(Iterator::collect::<std::io::Result<Vec<_>>>);
    let entries = entries.map_err(io)?;
    let files = entries.iter().map(|entry| entry.path().join("vis_data/scalars.json"));
    let mut files: Vec<_> = files.filter(|file| file.is_file()).collect();
    // Directories are named after their time.
    files.sort();
    if files.is_empty() {
        let text = "no scalars.json here, in vis_data/ or in */vis_data/; name a work directory";
        return Err(Error::data_of(path.display(), text));
    }
    Ok(files)
}

/// One line of a file.
struct Record<'a> {
    step: i64,
    /// Only lines of training have one.
    iter: Option<i64>,
    scalars: JsonObject<'a>,
}

/// JSON with Python's extensions.
const PYTHONS: ParseOptions = ParseOptions { allow_non_finite_numbers: true, ..STRICT_JSON };

/// Parses all lines except an incomplete last one.
fn records(text: &str) -> Result<Vec<Record<'_>>> {
    let mut records = Vec::new();
    for (number, line) in text.split_inclusive('\n').enumerate() {
        let fail = |e: &str| Error::data_of(format_args!("line {}", number + 1), e);
        let scalars = match parse_to_value(line, &PYTHONS) {
            Ok(Some(JsonValue::Object(scalars))) => scalars,
            Ok(None) => continue,
            Ok(_) => return Err(fail("not a JSON object")),
            Err(_) if !line.ends_with('\n') => continue,
            Err(e) => return Err(fail(&e.to_string())),
        };
        let integer = |name: &str| scalars.get_number(name)?.parse().ok();
        let step = integer("step").ok_or_else(|| fail("no integer `step`"))?;
        records.push(Record { step, iter: integer("iter"), scalars });
    }
    Ok(records)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(text: &str) -> Result<Run> {
        let mut run = Run::default();
        run.append(text, i64::MIN).map(|()| run)
    }

    /// Returns the lines of a recording that are MMEngine's `scalars.json`.
    fn scalars(recorded: &str) -> String {
        recorded.lines().filter(|l| l.starts_with('{')).map(|l| l.to_owned() + "\n").collect()
    }

    #[test]
    fn mmengines_files_are_read() {
        let by_epoch = run(&scalars(include_str!("../../tests/vectors/log_epoch.txt"))).unwrap();
        let by_iter = run(&scalars(include_str!("../../tests/vectors/log_iter.txt"))).unwrap();
        let at = |run: &Run, name: &str| run.curves[name].iter().map(|p| p.0).collect::<Vec<_>>();
        assert!(by_epoch.has_iters && by_iter.has_iters);
        assert_eq!(at(&by_epoch, "loss")[..3], [10, 20, 34]);
        // Epochs of 24 iterations: the last ones that were logged.
        assert_eq!(at(&by_epoch, "digits/accuracy"), [20, 44, 68]);
        assert_eq!(at(&by_iter, "digits/accuracy"), [20, 40, 60]);
    }

    #[test]
    fn steps_are_kept_if_no_line_has_an_iteration() {
        let run = run("{\"a\": 1, \"step\": 1}\n{\"a\": 2, \"step\": 5}\n").unwrap();
        assert!(!run.has_iters);
        assert_eq!(run.curves["a"], [(1, 1.0), (5, 2.0)]);
    }

    #[test]
    fn unreadable_scalars_file_is_named_in_the_error() {
        for (text, says) in [
            ("{\"step\": 1, \"a\": 1}\n[\n", "line 2: "),
            ("3", "line 1: not a JSON object"),
            ("{\"a\": 1}", "line 1: no integer `step`"),
        ] {
            let said = run(text).unwrap_err().to_string();
            assert!(said.starts_with(says), "{said}");
        }
    }

    #[test]
    fn pythons_numbers_and_incomplete_lines_are_accepted() {
        let text = "{\"step\": 1, \"a NaN\": 1}\n{\"step\": 2, \"a NaN\": NaN}\n\n\
                    {\"step\": 3, \"a NaN\": -Infinity, \"b\": null}\n{\"step\": 4, \"a NaN\": 3}\n{\"ste";
        let run = run(text).unwrap();
        let values = run.curves["a NaN"].iter().map(|p| p.1).collect::<Vec<_>>();
        assert_eq!((values[0], values[3], values.len()), (1.0, 3.0, 4));
        assert!(values[1].is_nan() && values[2].is_nan() && run.curves["b"][0].1.is_nan());
    }

    /// Creates one file per run: its directory, its first and last iteration, its value.
    fn runs(files: &[(&str, (i64, i64), f32)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, (first, last), value) in files {
            let line = |i| format!("{{\"loss\": {value}, \"iter\": {i}, \"step\": {i}}}\n");
            let vis = dir.path().join(name).join("vis_data");
            std::fs::create_dir_all(&vis).unwrap();
            let text: String = (*first..=*last).map(line).collect();
            std::fs::write(vis.join("scalars.json"), text).unwrap();
        }
        dir
    }

    #[test]
    fn resumed_run_is_whole_though_the_clock_went_back() {
        // Summer time ends between the two runs; they share iterations 9 and 10.
        let dir = runs(&[("20261025_025000", (1, 10), 1.0), ("20261025_021000", (9, 20), 2.0)]);
        let curve = &Run::read(dir.path()).unwrap().curves["loss"];
        assert_eq!(curve.iter().map(|p| p.0).collect::<Vec<_>>(), (1..=20).collect::<Vec<_>>());
        assert_eq!((curve[0].1, curve[19].1), (1.0, 2.0));
    }

    #[test]
    fn run_resumed_from_an_older_checkpoint_replaces_the_newer_one() {
        let (a, b, c) = ("20260101_000000", "20260102_000000", "20260103_000000");
        let dir = runs(&[(a, (1, 50), 1.0), (b, (50, 55), 2.0), (c, (40, 100), 3.0)]);
        let curve = &Run::read(dir.path()).unwrap().curves["loss"];
        assert_eq!(curve.iter().map(|p| p.0).collect::<Vec<_>>(), (1..=100).collect::<Vec<_>>());
        assert!(curve.iter().all(|p| p.1 == if p.0 < 40 { 1.0 } else { 3.0 }), "{curve:?}");
        // A run that began anew.
        let dir = runs(&[(a, (1, 8), 1.0), (b, (1, 3), 2.0)]);
        let curve = &Run::read(dir.path()).unwrap().curves["loss"];
        assert_eq!(curve[..], [(1, 2.0), (2, 2.0), (3, 2.0)]);
    }
}
