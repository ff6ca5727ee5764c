//! Prints the tables as C++ assertions: `assertions runtime|operators right|wrong [ABSENT...]`, and
//! their number to standard error. `assertions newer` prints the functions that CANN 8.1 lacks.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "printing is its purpose")]

use npu_sys::headers::{Part, Text, newer};

fn main() {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let text = match arguments.as_slice() {
        ["newer"] => {
            newer().for_each(|name| println!("{name}"));
            return;
        }
        ["runtime", "right", absent @ ..] => Text::right(Part::Runtime, absent),
        ["runtime", "wrong", absent @ ..] => Text::wrong(Part::Runtime, absent),
        ["operators", "right", absent @ ..] => Text::right(Part::Operators, absent),
        ["operators", "wrong", absent @ ..] => Text::wrong(Part::Operators, absent),
        _ => {
            eprintln!("usage: assertions newer | runtime|operators right|wrong [ABSENT...]");
            std::process::exit(2);
        }
    };
    print!("{}", text.source);
    eprintln!("{}", text.assertions);
}
