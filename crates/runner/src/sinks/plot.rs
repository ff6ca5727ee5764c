//! An SVG of what `scalars.json` holds: one small chart for each scalar, over its steps.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde_json::Value;

use crate::{Error, Result};

/// Width and height of a chart's plotting area, and the room around it, in pixels.
const SIZE: (f64, f64) = (360.0, 180.0);
const MARGIN: (f64, f64, f64, f64) = (64.0, 28.0, 16.0, 32.0);
/// Charts side by side.
const COLUMNS: usize = 2;
/// Points of a line at most: more than pixels would not show.
const MAX_POINTS: usize = 1000;

/// Draws the scalars of a `scalars.json` whose names are among `keys`; all but counters and times if
/// there are none. Python's `NaN` and `Infinity` are read, and leave a gap as `null` does; a last line that
/// is still being written is left out. Figures that all stand under one step, as MMEngine has a
/// validation's in a run by iterations, are drawn over the iterations before them.
///
/// # Errors
///
/// [`Error::Data`] naming the line that is not a JSON object, or if there is nothing to draw.
pub fn plot(text: &str, keys: &[String]) -> Result<String> {
    let mut series: BTreeMap<String, Series> = BTreeMap::new();
    let mut iter = 0.0;
    for (number, whole) in text.split_inclusive('\n').enumerate() {
        let fail = |e: &str| Error::Data(format!("line {}: {e}", number + 1));
        let line: Value = match parse(whole) {
            Ok(line) => line,
            Err(_) if whole.trim().is_empty() || !whole.ends_with('\n') => continue,
            Err(e) => return Err(fail(&e.to_string())),
        };
        let object = line.as_object().ok_or_else(|| fail("not a JSON object"))?;
        let step = object.get("step").and_then(Value::as_f64);
        let step = step.ok_or_else(|| fail("there is no number under `step`"))?;
        iter = object.get("iter").and_then(Value::as_f64).unwrap_or(iter);
        // A validation's times are not a step's.
        let wanted = |name: &str| match keys {
            [] => !["step", "iter", "epoch", "time", "data_time"].contains(&name),
            keys => keys.iter().any(|key| key == name),
        };
        for (name, value) in object.iter().filter(|(name, _)| wanted(name)) {
            let value = if value.is_null() { Some(f64::NAN) } else { value.as_f64() };
            if let Some(value) = value {
                series.entry(name.clone()).or_default().push(step, iter, value);
            }
        }
    }
    if series.is_empty() {
        return Err(Error::Data("there is nothing to draw".into()));
    }
    let (cell_width, cell_height) = (MARGIN.0 + SIZE.0 + MARGIN.2, MARGIN.1 + SIZE.1 + MARGIN.3);
    let (columns, rows) = (series.len().min(COLUMNS), series.len().div_ceil(COLUMNS));
    let (width, height) = (cell_width * columns as f64, cell_height * rows as f64);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    for (index, (name, series)) in series.iter().enumerate() {
        let x = MARGIN.0 + cell_width * (index % COLUMNS) as f64;
        let y = MARGIN.1 + cell_height * (index / COLUMNS) as f64;
        svg += &format!(
            "<g transform=\"translate({x} {y})\">\n{}</g>\n",
            chart(name, series.points())
        );
    }
    Ok(svg + "</svg>\n")
}

/// Values of one scalar.
#[derive(Default)]
struct Series {
    /// Over the steps that they stand under, and over the iterations before them.
    over: [Vec<(f64, f64)>; 2],
}

impl Series {
    fn push(&mut self, step: f64, iter: f64, value: f64) {
        self.over[0].push((step, value));
        self.over[1].push((iter, value));
    }

    fn points(&self) -> &[(f64, f64)] {
        let [steps, iters] = &self.over;
        if steps.iter().all(|point| point.0 == steps[0].0) { iters } else { steps }
    }
}

/// A line of JSON, or of what Python takes for JSON.
fn parse(line: &str) -> serde_json::Result<Value> {
    serde_json::from_str(line).or_else(|e| {
        let mut text = String::new();
        // What is between quotes stays as it is. MMEngine's names have none inside.
        for (index, part) in line.split('"').enumerate() {
            let quote = if index > 0 { "\"" } else { "" };
            let part = match index % 2 {
                0 => ["-Infinity", "Infinity", "NaN"]
                    .iter()
                    .fold(part.to_owned(), |part, word| part.replace(word, "null")),
                _ => part.to_owned(),
            };
            text += quote;
            text += &part;
        }
        serde_json::from_str(&text).map_err(|_| e)
    })
}

fn chart(name: &str, points: &[(f64, f64)]) -> String {
    let (x, y) = (Axis::of(points.iter().map(|p| p.0)), Axis::of(points.iter().map(|p| p.1)));
    let mut svg = format!(
        "<rect width=\"{}\" height=\"{}\" fill=\"none\" stroke=\"#999\"/>\n\
         <text x=\"0\" y=\"-8\" font-weight=\"bold\">{}</text>\n",
        SIZE.0,
        SIZE.1,
        escape(name)
    );
    for share in [0.0, 0.5, 1.0] {
        let (right, up) = (SIZE.0 * share, SIZE.1 * (1.0 - share));
        let (at, value) = (number(x.at(share)), number(y.at(share)));
        svg += &format!(
            "<line x2=\"{0}\" y1=\"{up}\" y2=\"{up}\" stroke=\"#eee\"/>\n\
             <text x=\"-6\" y=\"{1}\" text-anchor=\"end\">{value}</text>\n\
             <text x=\"{right}\" y=\"{2}\" text-anchor=\"middle\">{at}</text>\n",
            SIZE.0,
            up + 4.0,
            SIZE.1 + 16.0
        );
    }
    let every = points.len().div_ceil(MAX_POINTS);
    let last = points.len() - 1;
    let kept = points.iter().enumerate().filter(|(i, _)| i % every == 0 || *i == last);
    let (mut line, mut pen_down) = (String::new(), false);
    for (_, (step, value)) in kept {
        // A line is broken where there is no number, and a point that is alone is drawn as a dot.
        let moved = !pen_down;
        pen_down = value.is_finite();
        if pen_down {
            let (right, up) = (SIZE.0 * x.share(*step), SIZE.1 * (1.0 - y.share(*value)));
            let commands = if moved { &['M', 'L'][..] } else { &['L'] };
            for command in commands {
                let _ = write!(line, "{command}{right:.1} {up:.1}");
            }
        }
    }
    svg + &format!(
        "<path d=\"{line}\" fill=\"none\" stroke=\"#1f77b4\" stroke-width=\"1.5\" \
         stroke-linecap=\"round\"/>\n"
    )
}

/// A range of numbers.
struct Axis {
    low: f64,
    high: f64,
}

impl Axis {
    /// From the least finite value to the greatest; around a value that is alone.
    fn of(values: impl Iterator<Item = f64>) -> Self {
        let finite = values.filter(|v| v.is_finite());
        let (low, high) = finite
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)));
        match low < high {
            true => Self { low, high },
            false if low.is_finite() => Self { low: low - 0.5, high: low + 0.5 },
            false => Self { low: 0.0, high: 1.0 },
        }
    }

    /// Where `value` is between the ends, which may be as far apart as numbers can.
    fn share(&self, value: f64) -> f64 {
        let half = self.high / 2.0 - self.low / 2.0;
        // One value alone may be so great that there is nothing around it.
        let share = (value / 2.0 - self.low / 2.0) / half;
        if half > 0.0 { share.clamp(0.0, 1.0) } else { 0.5 }
    }

    fn at(&self, share: f64) -> f64 {
        self.low * (1.0 - share) + self.high * share
    }
}

/// Four digits that count.
fn number(value: f64) -> String {
    let size = value.abs();
    if size != 0.0 && !(1e-3..1e5).contains(&size) {
        return format!("{value:.2e}");
    }
    let text = format!("{value:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn escape(text: &str) -> String {
    let is_drawn = |c: &char| !c.is_control();
    let text: String = text.chars().filter(is_drawn).collect();
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn mmengines_scalars_are_drawn() {
        let recorded = include_str!("../../tests/vectors/log_epoch.txt");
        let text: String =
            recorded.lines().filter(|l| l.starts_with('{')).map(|l| l.to_owned() + "\n").collect();
        let svg = plot(&text, &[]).unwrap();
        for name in ["lr", "loss", "grad_norm", "digits/accuracy"] {
            assert!(svg.contains(&format!(">{name}</text>")), "{name}");
        }
        assert!(!svg.contains(">time</text>"));
        assert_eq!(plot(&text, &["loss".into()]).unwrap().matches("<path").count(), 1);
        // Steps 10 to 68: the line begins at the left and ends at the right.
        let lr = plot(&text, &["lr".into()]).unwrap();
        assert!(lr.contains("d=\"M0.0 ") && lr.contains("L360.0 "), "{lr}");
    }

    #[test]
    fn what_is_no_scalars_file_is_named() {
        for (text, says) in [
            ("{\"step\": 1, \"a\": 1}\n[\n", "line 2: "),
            ("3", "line 1: not a JSON object"),
            ("{\"a\": 1}", "line 1: there is no number under `step`"),
            ("{\"step\": 1, \"epoch\": 1}", "nothing to draw"),
            ("", "nothing to draw"),
        ] {
            let said = plot(text, &[]).unwrap_err().to_string();
            assert!(said.starts_with(says) || said.contains(says), "{said}");
        }
    }

    #[test]
    fn pythons_numbers_and_a_line_half_written_are_let_pass() {
        let text = "{\"step\": 1, \"a NaN\": 1}\n{\"step\": 2, \"a NaN\": NaN}\n\n\
                    {\"step\": 3, \"a NaN\": -Infinity, \"b\": null}\n{\"step\": 4, \"a NaN\": 3}\n{\"ste";
        let svg = plot(text, &[]).unwrap();
        assert!(svg.contains(">a NaN</text>") && svg.contains(">b</text>"), "{svg}");
        // Two points and nothing between.
        assert!(svg.contains("d=\"M0.0 180.0L0.0 180.0M360.0 0.0L360.0 0.0\""), "{svg}");
    }

    #[test]
    fn figures_under_one_step_are_drawn_over_iterations() {
        let recorded = include_str!("../../tests/vectors/log_iter.txt");
        let text: String =
            recorded.lines().filter(|l| l.starts_with('{')).map(|l| l.to_owned() + "\n").collect();
        let svg = plot(&text, &["digits/accuracy".into()]).unwrap();
        // After 20, 40 and 60 iterations.
        assert!(svg.contains("d=\"M0.0 ") && svg.contains("L180.0 "), "{svg}");
        assert!(svg.contains(">20</text>") && svg.contains(">60</text>"), "{svg}");
    }

    proptest! {
        #[test]
        fn any_numbers_and_names_are_drawn_inside(
            name in ".{1,5}",
            values in prop::collection::vec(prop::num::f64::NORMAL | prop::num::f64::ZERO, 1..40),
        ) {
            prop_assume!(!["step", "iter", "epoch", "time", "data_time"].contains(&name.as_str()));
            let lines = values.iter().enumerate().map(|(i, v)| {
                serde_json::json!({ "step": i, (name.as_str()): v }).to_string() + "\n"
            });
            let svg = plot(&lines.collect::<String>(), &[]).unwrap();
            let path = svg.split("<path d=\"").nth(1).unwrap().split('"').next().unwrap();
            let numbers = path.split(['M', 'L', ' ']).filter(|n| !n.is_empty());
            for number in numbers {
                let number: f64 = number.parse().unwrap();
                prop_assert!((0.0..=360.0).contains(&number), "{path}");
            }
        }
    }
}
