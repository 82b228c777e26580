// SPDX-License-Identifier: Apache-2.0
//! Bounds on what a chat template may do. Templates come with models, and a
//! model is a download: `{{ 'a' * 10**9 }}`, a string that doubles itself in
//! forty lines, or a list that nests until its destructor overflows the stack
//! must end in an error. The engine counts instructions (fuel) and recursion;
//! it bounds neither memory nor nesting, and it folds constants while
//! compiling. So:
//! - `check_chains` refuses source that would overflow the compiler's stack;
//! - `check_constants` refuses constant repetitions before they are folded;
//! - `bounded` rewrites the compiled program so that every instruction that
//!   can make a value large goes through a function here that charges the
//!   render's budget of bytes (budget.rs);
//! - names of those functions start with '%', so no template can name them.

use minijinja::machinery::{self, ast, Instruction, Instructions, Token, WhitespaceConfig};
use minijinja::value::{Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind};

use crate::budget::charge;
use crate::{python, python_filters};

/// Deeper values than any JSON that a request may carry are an attack on the
/// recursive destructors and printers.
const MAX_NESTING: usize = 64;

const MAX_TOKENS_IN_TAG: usize = 2000;
const MAX_BRANCHES: usize = 500;

/// Charges for a value that was just made, and bounds its nesting.
fn check(value: Value) -> Result<Value, Error> {
    measure(&value, MAX_NESTING)?;
    Ok(value)
}

fn measure(value: &Value, depth: usize) -> Result<(), Error> {
    if let Some(text) = value.as_str() {
        return charge(text.len());
    }
    charge(32)?;
    if !matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable | ValueKind::Map) {
        return Ok(());
    }
    if depth == 0 {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            format!("a value is nested more than {MAX_NESTING} deep"),
        ));
    }
    let is_map = value.kind() == ValueKind::Map;
    for item in value.try_iter()? {
        if is_map {
            measure(&value.get_item(&item)?, depth - 1)?;
        }
        match item.as_str() {
            // Shared, not copied: the string was charged when it was made.
            Some(_) => charge(32)?,
            None => measure(&item, depth - 1)?,
        }
    }
    Ok(())
}

/// Charges for a search in a value. A map finds a key without a look at the
/// rest, so there the instruction's fuel is enough.
fn searchable(value: Value) -> Result<Value, Error> {
    if value.kind() != ValueKind::Map {
        measure(&value, MAX_NESTING)?;
    }
    Ok(value)
}

/// Checks a value that goes into a namespace. Namespaces are the only values
/// that change, so what they hold must not lead back to one: such a ring is
/// never freed. Lazy values and macros may hide one.
fn settable(value: Value) -> Result<Value, Error> {
    measure(&value, MAX_NESTING)?;
    let value = match value.kind() {
        ValueKind::Iterable => Value::from(value.try_iter()?.collect::<Vec<Value>>()),
        _ => value,
    };
    leads_nowhere(&value)?;
    Ok(value)
}

fn leads_nowhere(value: &Value) -> Result<(), Error> {
    let Some(object) = value.as_object() else {
        return Ok(());
    };
    let type_name = object.type_name();
    let is_lazy = value.kind() == ValueKind::Iterable;
    if is_lazy || type_name.contains("Namespace") || type_name.contains("::vm::") {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            "a namespace can hold only data: no namespace, macro or lazy value",
        ));
    }
    if !matches!(value.kind(), ValueKind::Seq | ValueKind::Map) {
        return Ok(());
    }
    for item in value.try_iter()? {
        leads_nowhere(&item)?;
        if value.kind() == ValueKind::Map {
            leads_nowhere(&value.get_item(&item)?)?;
        }
    }
    Ok(())
}

fn concat(left: &Value, right: &Value) -> Result<Value, Error> {
    let mut text = python::Text::default();
    text.display(left)?;
    text.display(right)?;
    Ok(text.into_string().into())
}

fn add(left: Value, right: Value) -> Result<Value, Error> {
    if let (Some(a), Some(b)) = (left.as_str(), right.as_str()) {
        charge(a.len() + b.len())?;
        return Ok(Value::from([a, b].concat()));
    }
    let is_list = |v: &Value| matches!(v.kind(), ValueKind::Seq | ValueKind::Iterable);
    if is_list(&left) && is_list(&right) {
        // Never lazy: a chain of lazy sums nests without a nested value.
        let mut items = Vec::new();
        for item in left.try_iter()?.chain(right.try_iter()?) {
            charge(32)?;
            items.push(item);
        }
        return Ok(Value::from(items));
    }
    arithmetic(left, right, "+", i128::checked_add, |a, b| a + b)
}

fn multiply(left: Value, right: Value) -> Result<Value, Error> {
    for (many, count) in [(&left, &right), (&right, &left)] {
        let times = || {
            let n = i64::try_from(count.clone()).map_err(|_| {
                Error::new(ErrorKind::InvalidOperation, "only integers can repeat a value")
            })?;
            Ok::<usize, Error>(usize::try_from(n).unwrap_or(0))
        };
        if let Some(text) = many.as_str() {
            let times = times()?;
            charge(text.len().saturating_mul(times))?;
            return Ok(Value::from(text.repeat(times)));
        }
        if many.kind() == ValueKind::Seq {
            let times = times()?;
            let items: Vec<Value> = many.try_iter()?.collect();
            charge(items.len().saturating_mul(times).saturating_mul(32))?;
            let all = items.len() * times;
            return Ok(Value::from(
                items.into_iter().cycle().take(all).collect::<Vec<Value>>(),
            ));
        }
    }
    arithmetic(left, right, "*", i128::checked_mul, |a, b| a * b)
}

fn arithmetic(
    left: Value,
    right: Value,
    sign: &str,
    exact: fn(i128, i128) -> Option<i128>,
    float: fn(f64, f64) -> f64,
) -> Result<Value, Error> {
    let number = |v: &Value| match v.kind() {
        ValueKind::Bool => Some(Value::from(i64::from(v.is_true()))),
        ValueKind::Number => Some(v.clone()),
        _ => None,
    };
    let (Some(a), Some(b)) = (number(&left), number(&right)) else {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            format!("tried to use {sign} on {} and {}", left.kind(), right.kind()),
        ));
    };
    if a.is_integer() && b.is_integer() {
        if let (Ok(x), Ok(y)) = (i128::try_from(a.clone()), i128::try_from(b.clone())) {
            return exact(x, y)
                .and_then(|n| i64::try_from(n).ok())
                .map(Value::from)
                .ok_or_else(|| {
                    Error::new(ErrorKind::InvalidOperation, "an integer does not fit 64 bits")
                });
        }
    }
    Ok(Value::from(float(f64::try_from(a)?, f64::try_from(b)?)))
}

/// The functions that `bounded` calls.
pub fn install(environment: &mut Environment) {
    environment.add_function("%check", check);
    environment.add_function("%settable", settable);
    environment.add_function("%searchable", searchable);
    environment.add_function("%slice", python_filters::slice);
    environment.add_function("%concat", |a: Value, b: Value| concat(&a, &b));
    environment.add_function("%add", add);
    environment.add_function("%multiply", multiply);
    environment.set_formatter(|out, _, value| {
        let mut text = python::Text::default();
        text.display(value)?;
        out.write_str(&text.into_string()).map_err(Error::from)
    });
}

const CHECK: Instruction<'static> = Instruction::CallFunction("%check", Some(1));

/// What replaces one instruction, in order.
fn replacement<'s>(instruction: &Instruction<'s>) -> Vec<Instruction<'s>> {
    use Instruction as I;
    let same = instruction.clone();
    match instruction {
        I::EmitRaw(text) => vec![I::LoadConst(Value::from(*text)), I::Emit],
        I::StringConcat => vec![I::CallFunction("%concat", Some(2))],
        I::Add => vec![I::CallFunction("%add", Some(2))],
        I::Mul => vec![I::CallFunction("%multiply", Some(2))],
        I::CallMethod(name, count) => match python_filters::stand_in(name) {
            Some(function) => vec![I::CallFunction(function, *count), CHECK],
            None => vec![same, CHECK],
        },
        I::ApplyFilter(..)
        | I::CallFunction(..)
        | I::CallObject(..)
        | I::BuildList(..)
        | I::BuildMap(..) => vec![same, CHECK],
        I::Slice => vec![I::CallFunction("%slice", Some(4))],
        // The right side is on top; comparing costs at most its length.
        I::In => vec![I::CallFunction("%searchable", Some(1)), same],
        I::Eq | I::Ne | I::Lt | I::Lte | I::Gt | I::Gte | I::CompareAndPreserve(..) => {
            vec![CHECK, same]
        }
        // Value below, namespace above. Only namespaces outlive a loop's turn.
        I::SetAttr(..) => vec![I::Swap, I::CallFunction("%settable", Some(1)), I::Swap, same],
        _ => vec![same],
    }
}

/// The same program, bounded. Jumps are moved to where their targets went.
pub fn bounded<'s>(program: &Instructions<'s>) -> Instructions<'s> {
    let mut starts = Vec::new();
    let mut parts = Vec::new();
    let mut next = 0u32;
    while let Some(instruction) = program.get(parts.len() as u32) {
        let part = replacement(instruction);
        starts.push(next);
        next += part.len() as u32;
        parts.push(part);
    }
    starts.push(next);
    let moved = |target: u32| starts.get(target as usize).copied().unwrap_or(next);
    let mut out = Instructions::new(program.name(), program.source());
    for (index, part) in parts.into_iter().enumerate() {
        let line = program.get_line(index as u32).unwrap_or(0) as u16;
        for mut instruction in part {
            use Instruction as I;
            match &mut instruction {
                I::Jump(target)
                | I::JumpIfFalse(target)
                | I::JumpIfFalseOrPop(target)
                | I::JumpIfTrueOrPop(target)
                | I::Iterate(target)
                | I::BuildMacro(_, target, _) => *target = moved(*target),
                _ => {}
            }
            out.add_with_line(instruction, line);
        }
    }
    out
}

/// Refuses source on which the engine's parser or compiler would recurse too
/// deep: it bounds brackets and blocks, but not chains (`not not ...`,
/// `1 + 1 + ...`, `elif`). No real template comes near.
pub fn check_chains(source: &str, spaces: WhitespaceConfig) -> Result<(), Error> {
    let (mut in_tag, mut branches) = (0, 0);
    for item in machinery::tokenize(source, false, Default::default(), spaces) {
        let (token, span) = item?;
        in_tag += 1;
        match token {
            Token::VariableStart | Token::BlockStart | Token::TemplateData(_) => in_tag = 0,
            Token::Ident("elif") => branches += 1,
            _ => {}
        }
        if in_tag > MAX_TOKENS_IN_TAG || branches > MAX_BRANCHES {
            return Err(refuse("an expression or a chain of elif is too long", span.start_line));
        }
    }
    Ok(())
}

/// Refuses what constant folding would make large, and what reaches for other
/// templates, which do not exist here.
pub fn check_constants(template: &ast::Stmt) -> Result<(), Error> {
    statement(template)
}

fn refuse(what: &str, line: u16) -> Error {
    Error::new(ErrorKind::SyntaxError, format!("{what} (in line {line})"))
}

fn body(list: &[ast::Stmt]) -> Result<(), Error> {
    list.iter().try_for_each(statement)
}

fn statement(stmt: &ast::Stmt) -> Result<(), Error> {
    use ast::Stmt as S;
    match stmt {
        S::Template(x) => body(&x.children),
        S::EmitExpr(x) => expression(&x.expr),
        S::EmitRaw(_) | S::Continue(_) | S::Break(_) => Ok(()),
        S::ForLoop(x) => {
            expression(&x.iter)?;
            x.filter_expr.iter().try_for_each(expression)?;
            body(&x.body)?;
            body(&x.else_body)
        }
        S::IfCond(x) => {
            expression(&x.expr)?;
            body(&x.true_body)?;
            body(&x.false_body)
        }
        S::WithBlock(x) => {
            x.assignments.iter().try_for_each(|(_, value)| expression(value))?;
            body(&x.body)
        }
        S::Set(x) => expression(&x.expr),
        S::SetBlock(x) => {
            x.filter.iter().try_for_each(expression)?;
            body(&x.body)
        }
        S::AutoEscape(x) => {
            expression(&x.enabled)?;
            body(&x.body)
        }
        S::FilterBlock(x) => {
            expression(&x.filter)?;
            body(&x.body)
        }
        S::Macro(x) => {
            x.defaults.iter().try_for_each(expression)?;
            body(&x.body)
        }
        S::CallBlock(x) => {
            call(&x.call)?;
            x.macro_decl.defaults.iter().try_for_each(expression)?;
            body(&x.macro_decl.body)
        }
        S::Do(x) => call(&x.call),
        S::Block(x) => Err(refuse("blocks are not allowed", x.span().start_line)),
        S::Import(x) => Err(refuse("import is not allowed", x.span().start_line)),
        S::FromImport(x) => Err(refuse("import is not allowed", x.span().start_line)),
        S::Extends(x) => Err(refuse("extends is not allowed", x.span().start_line)),
        S::Include(x) => Err(refuse("include is not allowed", x.span().start_line)),
    }
}

fn call(x: &ast::Call) -> Result<(), Error> {
    expression(&x.expr)?;
    arguments(&x.args)
}

fn arguments(list: &[ast::CallArg]) -> Result<(), Error> {
    use ast::CallArg as A;
    list.iter().try_for_each(|argument| match argument {
        A::Pos(x) | A::PosSplat(x) | A::Kwarg(_, x) | A::KwargSplat(x) => expression(x),
    })
}

fn expression(expr: &ast::Expr) -> Result<(), Error> {
    use ast::Expr as E;
    match expr {
        E::Var(_) | E::Const(_) => Ok(()),
        E::Slice(x) => {
            expression(&x.expr)?;
            [&x.start, &x.stop, &x.step].into_iter().flatten().try_for_each(expression)
        }
        E::UnaryOp(x) => expression(&x.expr),
        E::BinOp(x) => {
            if matches!(x.op, ast::BinOpKind::Mul) && repeats(&x.left, &x.right) {
                return Err(refuse(
                    "a constant is repeated too often",
                    expr.span().start_line,
                ));
            }
            expression(&x.left)?;
            expression(&x.right)
        }
        E::Compare(x) => {
            expression(&x.expr)?;
            x.ops.iter().try_for_each(|op| expression(&op.expr))
        }
        E::IfExpr(x) => {
            expression(&x.test_expr)?;
            expression(&x.true_expr)?;
            x.false_expr.iter().try_for_each(expression)
        }
        E::Filter(x) => {
            x.expr.iter().try_for_each(expression)?;
            arguments(&x.args)
        }
        E::Test(x) => {
            expression(&x.expr)?;
            arguments(&x.args)
        }
        E::GetAttr(x) => expression(&x.expr),
        E::GetItem(x) => {
            expression(&x.expr)?;
            expression(&x.subscript_expr)
        }
        E::Call(x) => call(x),
        E::List(x) => x.items.iter().try_for_each(expression),
        E::Map(x) => x.keys.iter().chain(&x.values).try_for_each(expression),
    }
}

/// True for a product that would be folded to a long string or list: a
/// constant text times more than 1024, or any nested constant product.
fn repeats(left: &ast::Expr, right: &ast::Expr) -> bool {
    fn plain(expr: &ast::Expr) -> Option<Value> {
        match expr {
            ast::Expr::Const(x) => Some(x.value.clone()),
            _ => None,
        }
    }
    fn holds_many(expr: &ast::Expr) -> bool {
        use ast::Expr as E;
        match expr {
            E::Const(x) => x.value.kind() == ValueKind::String,
            E::List(_) | E::Map(_) => true,
            E::UnaryOp(x) => holds_many(&x.expr),
            E::BinOp(x) => holds_many(&x.left) || holds_many(&x.right),
            _ => false,
        }
    }
    for (many, count) in [(left, right), (right, left)] {
        if holds_many(many) {
            let is_simple = match many {
                ast::Expr::Const(_) => true,
                ast::Expr::List(list) => list.items.iter().all(|x| plain(x).is_some()),
                _ => false,
            };
            return match plain(count) {
                Some(n) => !is_simple || i64::try_from(n).map_or(true, |n| n > 1024),
                // Not constant, so not folded, unless it is made of constants.
                None => !matches!(
                    count,
                    ast::Expr::Var(_)
                        | ast::Expr::Filter(_)
                        | ast::Expr::Call(_)
                        | ast::Expr::GetAttr(_)
                        | ast::Expr::GetItem(_)
                        | ast::Expr::IfExpr(_)
                ),
            };
        }
    }
    false
}
