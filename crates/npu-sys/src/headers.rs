//! Generates C++ assertions from the tables, to check them against CANN's headers.
//!
//! One `static_assert` for each function, type, field and constant. [`Text::wrong`] puts a
//! plausible mistake into every assertion, so that none may hold: that shows that each assertion
//! can fail.

use std::fmt::Write;

use crate::status::{ACL_NAMES, ACLNN_NAMES, HCCL_NAMES};
use crate::sys::{
    ACL_FLAGS, ACL_NUMBERS, Acl, Constant, Field, HCCL_FIELDS, HCCL_LAYOUTS, HCCL_NUMBERS, Hccl,
    HcclCommConfig, Layout, NEWER_OP_HEADERS, NNOP_NUMBERS, Nnop, OP_HEADERS, Ops, Symbol,
};

/// The headers that the assertions check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// `acl/acl.h`, `hccl/hccl.h`: also in the wheels of torch_npu.
    Runtime,
    /// `aclnn/` and `aclnnop/`: only in an installed CANN.
    Operators,
}

/// The functions that CANN 8.1 does not declare, which an older CANN's headers may lack.
pub fn newer() -> impl Iterator<Item = &'static str> {
    let rows = Ops::SYMBOLS.iter().filter(|row| row.since != "8.1");
    rows.map(|row| row.name)
}

/// A translation unit.
#[derive(Clone, Debug)]
pub struct Text {
    /// The C++ source, with its includes.
    pub source: String,
    /// Number of assertions.
    pub assertions: usize,
    wrong: bool,
}

impl Text {
    /// Assertions that hold if the headers agree with the tables. Names in `absent`, which the
    /// headers do not declare, are left out.
    #[must_use]
    pub fn right(part: Part, absent: &[&str]) -> Self {
        Self::new(part, absent, false)
    }

    /// The same assertions with a mistake in each: none holds if all of [`right`](Self::right) do.
    #[must_use]
    pub fn wrong(part: Part, absent: &[&str]) -> Self {
        Self::new(part, absent, true)
    }

    fn new(part: Part, absent: &[&str], wrong: bool) -> Self {
        let source = "#include <cstddef>\n#include <cstdint>\n#include <type_traits>\n".into();
        let mut text = Self { source, assertions: 0, wrong };
        match part {
            Part::Runtime => {
                text.includes(&["acl/acl.h", "acl/acl_rt.h", "hccl/hccl_types.h", "hccl/hccl.h"]);
                text.functions(Acl::SYMBOLS, absent);
                text.functions(Hccl::SYMBOLS, absent);
                text.layouts(ACL_NUMBERS.0);
                text.layouts(HCCL_NUMBERS.0);
                text.layouts(HCCL_LAYOUTS);
                HCCL_FIELDS.iter().for_each(|fields| text.fields(fields));
                text.comm_config();
                for constants in [ACL_NUMBERS.1, HCCL_NUMBERS.1, ACL_FLAGS, ACL_NAMES, HCCL_NAMES] {
                    text.constants(constants, absent);
                }
            }
            Part::Operators => {
                let operators: Vec<_> =
                    OP_HEADERS.iter().map(|name| format!("aclnnop/aclnn_{name}.h")).collect();
                text.includes(&[
                    "aclnn/acl_meta.h",
                    "aclnn/aclnn_base.h",
                    "aclnn/opdev/op_errno.h",
                ]);
                text.includes(&operators.iter().map(String::as_str).collect::<Vec<_>>());
                for name in NEWER_OP_HEADERS {
                    let header = format!("\"aclnnop/aclnn_{name}.h\"");
                    let _ = writeln!(
                        text.source,
                        "#if __has_include({header})\n#include {header}\n#endif"
                    );
                }
                text.functions(Nnop::SYMBOLS, absent);
                text.functions(Ops::SYMBOLS, absent);
                text.layouts(NNOP_NUMBERS.0);
                text.constants(ACLNN_NAMES, absent);
            }
        }
        text
    }

    fn includes(&mut self, headers: &[&str]) {
        for header in headers {
            let _ = writeln!(self.source, "#include \"{header}\"");
        }
    }

    fn holds(&mut self, condition: &str, what: &str) {
        let _ = writeln!(self.source, "static_assert({condition}, \"row {what}\");");
        self.assertions += 1;
    }

    fn functions(&mut self, symbols: &[Symbol], absent: &[&str]) {
        for symbol in symbols.iter().filter(|symbol| !absent.contains(&symbol.name)) {
            let result = (symbol.result)();
            let mut parameters: Vec<_> = symbol.parameters.iter().map(|c| c()).collect();
            if self.wrong {
                match parameters.pop() {
                    Some(last) => parameters.push(mistaken(&last)),
                    None => parameters.push("int32_t".into()),
                }
            }
            let (name, parameters) = (symbol.name, parameters.join(", "));
            let ours = format!("{result} (*)({parameters})");
            self.holds(&format!("std::is_same<decltype(&{name}), {ours}>::value"), name);
        }
    }

    fn layouts(&mut self, layouts: &[Layout]) {
        for Layout { name, size, align } in layouts {
            let size = size + usize::from(self.wrong);
            let align = align + usize::from(self.wrong);
            self.holds(&format!("sizeof({name}) == {size}"), &format!("sizeof {name}"));
            self.holds(&format!("alignof({name}) == {align}"), &format!("alignof {name}"));
        }
    }

    fn fields(&mut self, fields: &[Field]) {
        for Field { of, name, offset, size } in fields {
            let offset = offset + usize::from(self.wrong);
            let size = size + usize::from(self.wrong);
            let condition = format!("offsetof({of}, {name}) == {offset}");
            self.holds(&condition, &format!("offsetof {of}.{name}"));
            let condition = format!("sizeof((({of}*)nullptr)->{name}) == {size}");
            self.holds(&condition, &format!("sizeof {of}.{name}"));
        }
    }

    fn constants(&mut self, constants: &[Constant], absent: &[&str]) {
        for Constant { name, value } in constants.iter().filter(|c| !absent.contains(&c.name)) {
            let value = value + i64::from(self.wrong);
            self.holds(&format!("static_cast<long long>({name}) == {value}"), name);
        }
    }

    /// Our struct is version 5: it equals that version, or is the beginning of a later one.
    fn comm_config(&mut self) {
        let (mut magic, mut size) = (HcclCommConfig::MAGIC, HcclCommConfig::SIZE);
        if self.wrong {
            (magic, size) = (magic + 1, 1 << 20);
        }
        self.holds(&format!("HCCL_COMM_CONFIG_MAGIC_WORD == {magic}"), "magic of HcclCommConfig");
        let fifth = HcclCommConfig::VERSION;
        let condition = format!(
            "HCCL_COMM_CONFIG_VERSION == {fifth} ? sizeof(HcclCommConfig) == {size} \
             : HCCL_COMM_CONFIG_VERSION > {fifth} && sizeof(HcclCommConfig) > {size}"
        );
        self.holds(&condition, "size of HcclCommConfig");
    }
}

/// Returns a plausible wrong type for `c`.
fn mistaken(c: &str) -> String {
    match c {
        "float" => "double".into(),
        "double" => "float".into(),
        "bool" => "int32_t".into(),
        "int32_t" => "int64_t".into(),
        "int64_t" => "int32_t".into(),
        "uint32_t" => "uint64_t".into(),
        "size_t" | "uint64_t" => "uint32_t".into(),
        other => match other.strip_suffix(" const*") {
            Some(pointee) => format!("{pointee}*"),
            None => match other.strip_suffix('*') {
                Some(pointee) => format!("{pointee} const*"),
                None => format!("{other}*"),
            },
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn assertions_declare_the_rows_in_c() {
        let Text { source, assertions, .. } = Text::right(Part::Runtime, &["aclFinalize"]);
        assert!(source.contains("decltype(&aclInit), aclError (*)(char const*)>"), "{source}");
        assert!(!source.contains("aclFinalize"), "{source}");
        let all = Text::right(Part::Runtime, &[]);
        assert_eq!(all.assertions, assertions + 1);
        let wrong = Text::wrong(Part::Runtime, &[]);
        assert_eq!(wrong.assertions, all.assertions);
        assert!(wrong.source.contains("decltype(&aclFinalize), aclError (*)(int32_t)>"));
        assert_eq!(newer().count(), 8);
        let lists = Text::right(Part::Operators, &[]).source;
        assert!(lists.contains("#if __has_include(\"aclnnop/aclnn_fused_sgd.h\")"), "{lists}");
        assert!(lists.contains("aclTensorList* (*)(aclTensor const* const*, uint64_t)"), "{lists}");
    }

    #[test]
    fn mistaken_returns_another_type_for_every_parameter() {
        let symbols = [Acl::SYMBOLS, Nnop::SYMBOLS, Ops::SYMBOLS, Hccl::SYMBOLS];
        for c in symbols.iter().copied().flatten().flat_map(|symbol| symbol.parameters) {
            assert_ne!(mistaken(&c()), c());
        }
    }
}
